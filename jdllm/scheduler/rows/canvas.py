"""Rows of full-attention models: each holds its whole canvas from admission to its end.

There is no prefill and nothing grows. A running row has all pages of its canvas and its share
of the tokens of a forward, so one launch holds all rows and no row is preempted for another. A
row that lost its K,V begins again with a canvas on which its committed tokens are given.

Why nothing hangs: `prepare` refuses a canvas that could not run alone in the pool, and the
bucket's tokens hold the longest canvas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import numpy as np

from jdllm import errors
from jdllm.scheduler import limits, sizes
from jdllm.scheduler.batch import Bucket, CommittedBlock, RowResult, ScheduleBatch, ScheduledRow
from jdllm.scheduler.commits import Progress
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows import interface, tokens
from jdllm.scheduler.stay import Stay

# In a packed forward, each row's tokens begin at a multiple of this.
ALIGNMENT = 8
# A canvas of up to this many tokens is short and has buckets of its own, without the forward sizes
# of longer ones: a prompt and the 256 new tokens of the published evaluations. For these buckets a
# third more copies of the layers are compiled (16 rows of 4,096: 77 instead of 58).
SHORT_CANVAS = 512
# Tokens to write if the request sets no limit, as in the published evaluations of these models.
DEFAULT_TOKENS = 256
# In tokens, for one row and for several rows: the compiled sizes of a forward are multiples of the
# grain, and the smallest size.
GRAINS = (32, 128)
LEAST = (64, 128)
FEW_ROWS = 4


def packed_len(num_tokens: int) -> int:
    """Returns how many tokens of a forward a canvas of `num_tokens` takes at most."""
    return -(-num_tokens // ALIGNMENT) * ALIGNMENT


def forward_sizes(rows: int, most: int, *, is_coarse: bool) -> tuple[int, ...]:
    """Returns the compiled sizes in tokens of a forward of `rows` rows; the last holds `most`.

    There are two sizes to an octave. For 2 to `FEW_ROWS` rows there are four: arithmetic bounds
    their forwards, so padding lengthens them, while the windows of many rows even out. Sizes are
    never closer than the grain. With `is_coarse` they are a factor of four apart, for devices on
    which compiling a size takes longer than its padding ever will.
    """
    grain, least = GRAINS[rows > 1], LEAST[rows > 1]
    parts = 4 if 1 < rows <= FEW_ROWS else 2
    found = [max(least, -(-most // grain) * grain)]
    while found[-1] > least:
        size = found[-1]
        octave = 1 << (size - 1).bit_length() - 1  # the power of two below
        lower = size // 4 if is_coarse else size - max(grain, octave // parts)
        found.append(max(least, -(-lower // grain) * grain))
    return tuple(reversed(found))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasBucket(Bucket):
    """Canvases of up to `rows` rows, whose `packed_len` together is at most `tokens`.

    With `is_whole` every forward has `tokens` tokens, however few the rows need.
    """

    name: ClassVar[str] = "canvas"

    is_whole: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasBuckets:
    """Ascending `rows` of a canvas launch, and the `tokens` of one forward of all its rows.

    The longest canvas takes `row_tokens` of these. The other two fields save time on the host. A
    launch contains the layers once for each size of a forward, and XLA prepares every kernel of a
    launch before each run (LLaDA-8B, 32 layers: 1 to 2 ms on the host for each size, while a
    forward of few tokens takes 5 ms).

    `short_row_tokens`: canvases that together take at most this many tokens for each row of the
    bucket have separate launches, without the sizes that only longer canvases need; 0 means that
    there are no separate launches. `whole_tokens`, ascending, are the sizes of launches of one row
    that always forward its whole canvas, so they contain the layers once. They matter for the first
    launch of a request, because no earlier launch hides the host's time; () means that there are
    none.
    """

    rows: tuple[int, ...]
    tokens: int
    row_tokens: int
    short_row_tokens: int = 0
    whole_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes.check_ascending("rows", self.rows)
        if not 1 <= self.row_tokens <= self.tokens:
            raise errors.ConfigError(
                f"{self.tokens=} of a forward must hold the longest canvas of {self.row_tokens=}"
            )
        lengths = (self.tokens, self.row_tokens, self.short_row_tokens)
        if any(length % ALIGNMENT for length in lengths):
            raise errors.ConfigError(
                f"{self.tokens=}, {self.row_tokens=} and {self.short_row_tokens=} must be "
                f"multiples of {ALIGNMENT}"
            )
        if self.whole_tokens:
            sizes.check_ascending("whole_tokens", self.whole_tokens)
            if self.whole_tokens[-1] < self.row_tokens:
                raise errors.ConfigError(
                    f"{self.whole_tokens=} must hold the longest canvas of {self.row_tokens=}"
                )

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @classmethod
    def default(
        cls,
        max_running_requests: int,
        token_budget: int,
        context_length: int,
        *,
        short_row_tokens: int = 0,
        whole_tokens: tuple[int, ...] = (),
    ) -> CanvasBuckets:
        """Builds row sizes, powers of four; a forward holds the budget, or a longer context."""
        powers = [1 << i for i in range(0, max_running_requests.bit_length(), 2)]
        row_tokens = packed_len(context_length)
        tokens = max(packed_len(token_budget), row_tokens)
        return cls(
            rows=tuple(sorted({*powers, max_running_requests})),
            tokens=min(tokens, max_running_requests * row_tokens),
            row_tokens=row_tokens,
            short_row_tokens=short_row_tokens,
            whole_tokens=whole_tokens,
        )

    def all(self) -> list[Bucket]:
        """Returns every bucket to compile."""
        whole = [self.whole_canvas(tokens) for tokens in self.whole_tokens]
        windows = [self.canvas(n, tokens) for n in self.rows for tokens in self._tokens_of(n)]
        return windows + whole + [self.with_logits(n) for n in self.logit_rows]

    @property
    def logit_rows(self) -> tuple[int, ...]:
        """Rows of launches with logits: the most. Rows that are padding take no tokens."""
        return self.rows[-1:]

    def canvas(self, rows: int, tokens: int) -> Bucket:
        """Returns the smallest bucket that holds `rows` canvases of together `tokens` tokens."""
        rows = sizes.smallest(self.rows, rows, "rows")
        return CanvasBucket(
            rows=rows,
            tokens=sizes.smallest(self._tokens_of(rows), tokens, "tokens"),
        )

    def with_logits(self, rows: int) -> Bucket:
        """Returns the smallest bucket for `rows` canvases of which some need their logits."""
        rows = sizes.smallest(self.logit_rows, rows, "rows")
        return CanvasBucket(rows=rows, tokens=self._tokens_of(rows)[-1], with_logits=True)

    def _tokens_of(self, rows: int) -> tuple[int, ...]:
        """Returns the tokens of the buckets with `rows` rows: for short canvases, and for all."""
        short, most = rows * self.short_row_tokens, min(self.tokens, rows * self.row_tokens)
        # Only if short is less than half of most: then its launches omit at least two sizes.
        return (short, most) if 0 < 2 * short < most else (most,)

    def whole_canvas(self, tokens: int) -> Bucket:
        """Returns the smallest bucket that always forwards one whole canvas of `tokens` tokens."""
        return CanvasBucket(
            rows=1,
            tokens=sizes.smallest(self.whole_tokens, tokens, "tokens"),
            is_whole=True,
        )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CanvasStay(Stay):
    """The stay of a canvas row, with the canvas as it was when the row began.

    `canvas_ids` is the whole canvas, None where a token is to be written; the suffix begins at
    `canvas_end`. `num_settled` counts the tokens that the row has reported since it began.
    `tokens_per_step` is the pace of its last launch, 0 if it is unknown. `last_step` is the last
    step of which a frame was shown.
    """

    canvas_ids: list[int | None]
    canvas_end: int
    num_settled: int = 0
    tokens_per_step: float = 0.0
    last_step: int = 0


class CanvasRows:
    """Plans launches of all running canvases, and stores the tokens that settle."""

    defaults: ClassVar[interface.RowDefaults] = interface.RowDefaults(
        # A row may forward its whole context in each step.
        cpu_rows=4,
        accelerator_rows=16,
        # Each position costs state and padding, and Dream's config.json says 131,072.
        most_context=4096,
        unused_options=("max_prefill_tokens", "disable_fused_commit"),
        why_unused="which has neither a prefill nor commits of its own",
    )

    def __init__(self, config: interface.RowConfig, buckets: CanvasBuckets):
        if config.has_prefix_cache:
            raise errors.ConfigError(
                "canvases share no prefixes: every K,V depends on later tokens"
            )
        self.live = config.live_requests()
        self._limits = config.limits
        self._detokenize = config.detokenize
        self._buckets = buckets
        self._decode_steps = config.decode_steps

    @classmethod
    def build(cls, config: interface.RowConfig) -> Self:
        """Returns rows with the buckets that suit the device."""
        has_graphs = config.device.uses_cuda_graphs
        row_tokens = packed_len(config.context_length)
        buckets = CanvasBuckets.default(
            config.max_running_requests,
            config.prefill_token_budget,
            config.context_length,
            short_row_tokens=SHORT_CANVAS if has_graphs else 0,
            whole_tokens=forward_sizes(1, row_tokens, is_coarse=False) if has_graphs else (),
        )
        return cls(config, buckets)

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return self._buckets.max_rows

    def buckets(self) -> list[Bucket]:
        """Returns every bucket that a batch may have."""
        return self._buckets.all()

    def default_new_tokens(self, prompt_len: int, block_length: int | None) -> int:
        """Returns at most `DEFAULT_TOKENS`, since a forward may cover the whole canvas.

        The result is whole blocks, counted from the prompt's end, if there is room for one.
        """
        block_size = block_length or self._limits.block_size
        rest = min(self._limits.context_length, self._limits.pool_tokens) - prompt_len
        rest = min(rest, DEFAULT_TOKENS)
        return max(1, rest // block_size * block_size or rest)

    def prepare(self, request: Request) -> None:
        """Raises a `RequestError` for a canvas that could not run even alone."""
        self._limits.check(request)
        limits.check_given(request)
        written = self._written_len(request)
        limits.check_schedule(request, written, self._limits.context_length)
        total = len(request.prompt_ids) + written + len(request.suffix_ids)
        self._limits.check_pages(request, total)

    def admit(self, request: Request) -> CanvasStay | interface.Refusal:
        """Takes the pages of the whole canvas; changes nothing without room.

        Tokens that the request has already committed are given on the new canvas.
        """
        written = self._written_len(request)
        end = len(request.prompt_ids) + written
        length = end + len(request.suffix_ids)
        lengths = [len(stay_of(row).canvas_ids) for row in self.live.running]
        if sum(map(packed_len, [*lengths, length])) > self._buckets.tokens:
            return interface.Refusal.NO_ROOM
        stay = CanvasStay(slot=self.live.next_slot, canvas_ids=[], canvas_end=end)
        if not self.live.pages.grow(stay, length):
            return interface.Refusal.NO_ROOM
        places = [request.given.get(place) for place in range(written)]
        places[: len(request.output_ids)] = request.output_ids
        stay.canvas_ids = [*request.prompt_ids, *places, *request.suffix_ids]
        return stay

    def plan(self) -> ScheduleBatch | None:
        """Returns a launch of all running requests; None if no request runs."""
        rows = tuple(
            ScheduledRow(
                request=request,
                stay=request.held,
                start=0,
                num_tokens=len(stay_of(request).canvas_ids),
                is_fresh=request.held.is_fresh,
            )
            for request in self.live.running
        )
        if not rows:
            return None
        for row in rows:
            row.stay.is_fresh = False
        bucket, max_steps = self._launch_of(rows)
        return ScheduleBatch(
            rows=rows,
            bucket=bucket,
            max_steps=max_steps,
            max_finished=self.live.max_finished(len(rows)),
        )

    def _launch_of(self, rows: tuple[ScheduledRow, ...]) -> tuple[Bucket, int]:
        """Returns the bucket of a launch and its largest number of steps.

        The first forward of a row covers its whole canvas, and with some options every forward
        does. So a row that runs alone has a launch of its own for its first forward, and reports
        its tokens after it.
        """
        total = sum(packed_len(row.num_tokens) for row in rows)
        if any(row.request.sampling.needs_logits for row in rows):
            return self._buckets.with_logits(len(rows)), self._decode_steps
        if len(rows) == 1 and self._buckets.whole_tokens:
            (row,) = rows
            whole = self._buckets.whole_canvas(total)
            if row.is_fresh:
                return whole, 1
            if row.request.sampling.dllm.forwards_whole_canvas:
                return whole, self._decode_steps
        return self._buckets.canvas(len(rows), total), self._decode_steps

    def apply(self, request: Request, result: RowResult) -> Progress:
        """Stores the tokens that settled, if any; says whether one of them ends the output."""
        known = len(request.output_ids)
        if result.frames:
            (last,), stay = result.frames, stay_of(request)
            shown = last.value.frames(request, stay.canvas_ids, stay.num_settled, stay.last_step)
            stay.last_step = max(stay.last_step, last.step)
            result = dataclasses.replace(result, frames=shown)
        progress = tokens.apply(request, result, self._append, self._detokenize)
        # Only what is new to the host: a row that began again reports its earlier tokens too.
        new = len(request.output_ids) - known
        stay_of(request).tokens_per_step = new / max(result.nfe, 1)
        return progress

    def settle(self, request: Request, result: RowResult) -> None:
        """Does nothing: no K,V of a canvas is ever final."""

    def steps_left(self, request: Request) -> float:
        """Returns the steps until the output is complete, at the pace of the last launch."""
        left, pace = (
            request.max_new_tokens - len(request.output_ids),
            stay_of(request).tokens_per_step,
        )
        return left / pace if pace else math.inf

    def _append(self, request: Request, block: CommittedBlock) -> list[int]:
        """Stores tokens that settled and returns them, without those of an earlier stay.

        Tokens behind an end token are left out too: an early stop settles them all at once.
        """
        stay = stay_of(request)
        known = len(request.output_ids) - stay.num_settled
        stay.num_settled += len(block.tokens)
        (ends,) = np.nonzero(np.isin(block.tokens, request.end_token_ids))
        shown = slice(known, ends[0] + 1 if len(ends) else None)
        new = request.extend(
            block.tokens[shown],
            block.steps[shown],
            block.logprobs[shown],
            block.top_tokens(shown, request.sampling.top_logprobs),
        )
        length = request.sampling.dllm.block_length or self._limits.block_size
        request.num_blocks = -(-len(request.output_ids) // length)
        return new

    def _written_len(self, request: Request) -> int:
        """Returns how many positions the canvas has between prompt and suffix.

        Without a suffix these are whole blocks, as far as context and pool allow.
        """
        wanted = request.max_new_tokens
        if request.suffix_ids:
            return wanted
        length = request.sampling.dllm.block_length or 1
        room = min(self._limits.context_length, self._limits.pool_tokens) - len(request.prompt_ids)
        return max(wanted, min(-(-wanted // length) * length, room))


def stay_of(request: Request) -> CanvasStay:
    """Returns the stay of a running canvas request."""
    stay = request.held
    assert isinstance(stay, CanvasStay)
    return stay
