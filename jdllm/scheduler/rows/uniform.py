"""Rows that denoise canvases of random tokens behind a context that is encoded first.

A running request has two phases, which follow from its state: encode while committed tokens lack
K,V in its pages, then denoise one canvas in its slot, until that is done. Its output is committed
and has to be encoded, too, so the phases alternate. Encoding goes first, because rows that wait for
it leave places of a denoise launch empty. After the launch that reaches `max_prefill_tokens`,
denoising gets a turn of one step. So neither phase starves.

A token's K,V depend only on the tokens before it, so any page of encoded tokens can serve other
requests. Why nothing hangs: as for rows that write block after block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

from jdllm import errors
from jdllm.scheduler import limits, sizes
from jdllm.scheduler.batch import Bucket, CommittedBlock, RowResult, ScheduleBatch, ScheduledRow
from jdllm.scheduler.commits import Progress
from jdllm.scheduler.request import Request, RequestState
from jdllm.scheduler.rows import interface, tokens
from jdllm.scheduler.stay import Stay

# Queries that attention takes at a time; a row's part of an encode launch is padded to them.
LARGEST_TILE = 64
# Options of a request that need its logits, or the canvas of each step.
_NEED_LOGITS = (
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_new_tokens",
    "top_logprobs",
    "min_p",
)


def tile_of(canvas_length: int) -> int:
    """Returns how many queries attention takes at a time when it encodes."""
    return min(LARGEST_TILE, canvas_length)


class EncodeBucket(Bucket):
    """Context tokens of up to `rows` requests, packed into `tokens`."""

    name = "encode"
    denoises = False


class NoiseBucket(Bucket):
    """Denoising steps of `rows` rows, one canvas each."""

    name = "denoise"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniformBuckets:
    """Ascending sizes: rows of a denoise launch, tokens and rows of an encode launch."""

    denoise_rows: tuple[int, ...]
    encode_tokens: tuple[int, ...]
    encode_rows: int
    canvas_length: int

    def __post_init__(self) -> None:
        for name in ("denoise_rows", "encode_tokens"):
            sizes.check_ascending(name, getattr(self, name))
        tile = tile_of(self.canvas_length)
        if any(tokens % tile for tokens in self.encode_tokens):
            raise errors.ConfigError(f"{self.encode_tokens=} must be multiples of {tile}")

    @classmethod
    def default(cls, max_running_requests: int, budget: int, canvas_length: int) -> UniformBuckets:
        """Builds denoise sizes (powers of two) and encode sizes (the budget, halved repeatedly)."""
        powers = sizes.powers_of_two(max_running_requests)
        return cls(
            denoise_rows=tuple(sorted({*powers, max_running_requests})),
            encode_tokens=sizes.halvings(budget, tile_of(canvas_length)),
            encode_rows=max_running_requests,
            canvas_length=canvas_length,
        )

    def all(self) -> list[Bucket]:
        """Returns every bucket to compile."""
        encode = [self.encode(tokens) for tokens in self.encode_tokens]
        return encode + [self.denoise(rows) for rows in self.denoise_rows]

    def denoise(self, rows: int) -> Bucket:
        """Returns the smallest bucket that holds `rows` rows."""
        rows = sizes.smallest(self.denoise_rows, rows, "rows")
        return NoiseBucket(rows=rows, tokens=rows * self.canvas_length)

    def encode(self, tokens: int) -> Bucket:
        """Returns the smallest bucket that holds `tokens` tokens, padding of tiles included."""
        return EncodeBucket(
            rows=self.encode_rows, tokens=sizes.smallest(self.encode_tokens, tokens, "tokens")
        )


class UniformRows:
    """Plans encode and denoise launches of the running requests, and stores their canvases."""

    defaults: ClassVar[interface.RowDefaults] = interface.RowDefaults(
        cpu_rows=8, accelerator_rows=64, shares_prefixes=True
    )

    def __init__(self, config: interface.RowConfig, buckets: UniformBuckets):
        # Any number of tokens may be encoded, unlike whole blocks.
        self.live = dataclasses.replace(config, block_size=1).live_requests()
        self._limits = config.limits
        self._detokenize = config.detokenize
        self._buckets = buckets
        self._length = buckets.canvas_length
        self._tile = tile_of(self._length)
        self._budget = min(max(self._tile, config.prefill_token_budget), buckets.encode_tokens[-1])
        self._max_prefill_tokens = config.max_prefill_tokens
        self._decode_steps = config.decode_steps
        self._encoded_in_a_row = 0

    @classmethod
    def build(cls, config: interface.RowConfig) -> Self:
        """Returns rows with the buckets that suit the options."""
        buckets = UniformBuckets.default(
            config.max_running_requests, config.prefill_token_budget, config.block_size
        )
        return cls(config, buckets)

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return self._buckets.denoise_rows[-1]

    def buckets(self) -> list[Bucket]:
        """Returns every bucket that a batch may have."""
        return self._buckets.all()

    def default_new_tokens(self, prompt_len: int, block_length: int | None) -> int:
        """Returns how many tokens remain in the context and in the pool, in whole canvases."""
        del block_length
        free = self._limits.pool_tokens - prompt_len
        return max(
            1, min(self._limits.context_length - prompt_len, free // self._length * self._length)
        )

    def prepare(self, request: Request) -> None:
        """Raises a `RequestError` for a request that could not finish alone in the pool.

        Also for options that this kind of rows does not serve.
        """
        self._limits.check(request)
        limits.check_open_ended(request)
        _check_options(request)
        canvases = -(-request.max_new_tokens // self._length)
        self._limits.check_pages(request, len(request.prompt_ids) + canvases * self._length)

    def admit(self, request: Request) -> Stay | interface.Refusal:
        """Takes pages for committed tokens and a canvas; if too few are free, changes nothing."""
        stay, pages = Stay(slot=self.live.next_slot), self.live.pages
        if not pages.admit(request, stay):
            return interface.Refusal.NO_ROOM
        if not pages.grow(stay, request.num_tokens + self._length):
            pages.release(request, stay, keep=False)
            return interface.Refusal.NO_ROOM
        return stay

    def plan(self) -> ScheduleBatch | None:
        """Returns the next launch, of either phase; None if no request runs."""
        plans = [self._encode, self._denoise]
        if self._encoded_in_a_row >= self._max_prefill_tokens:
            plans.reverse()
        for plan in plans:
            batch = plan()
            if batch is not None:
                return batch
        return None

    def apply(self, request: Request, result: RowResult) -> Progress:
        """Stores the canvas that is done, if it is; says whether it ends the output."""
        return tokens.apply(request, result, _append, self._detokenize)

    def settle(self, request: Request, result: RowResult) -> None:
        """Offers full pages to the prefix cache; a row whose canvas is done begins a new one."""
        request.held.is_fresh |= bool(result.committed)
        self.live.pages.publish(request)

    def steps_left(self, request: Request) -> float:
        """Returns infinity: canvases take an unpredictable number of steps."""
        del request
        return math.inf

    def _encode(self) -> ScheduleBatch | None:
        """Packs tokens without K,V of the oldest requests, up to the token budget."""
        rows: list[ScheduledRow] = []
        budget = self._budget
        for request in self.live.running:
            if budget < self._tile:
                break
            stay = request.held
            start, count = stay.context_len, request.num_tokens - stay.context_len
            count = min(count, budget)
            if count == 0:
                continue
            rows.append(ScheduledRow(request=request, stay=stay, start=start, num_tokens=count))
            budget -= sizes.in_units(count, self._tile)
            stay.context_len += count  # whatever reads their K,V is a later launch
        if not rows:
            return None
        bucket = self._buckets.encode(
            sum(sizes.in_units(row.num_tokens, self._tile) for row in rows)
        )
        self._encoded_in_a_row += bucket.tokens
        return ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _denoise(self) -> ScheduleBatch | None:
        """Plans steps of the canvas of every request whose context is encoded."""
        running = self.live.running
        rows: list[ScheduledRow] = []
        for request in [one for one in running if not _needs_encoding(one)]:
            if request.state is not RequestState.RUNNING:
                break  # An older one needed its pages: no other follows.
            if not self.live.reserve(request, request.num_tokens + self._length):
                break  # The request was the youngest.
            stay = request.held
            rows.append(
                ScheduledRow(
                    request=request,
                    stay=stay,
                    start=stay.context_len,
                    num_tokens=self._length,
                    is_fresh=stay.is_fresh,
                )
            )
        if not rows:
            return None
        self._encoded_in_a_row = 0
        for row in rows:
            row.stay.is_fresh = False
        return ScheduleBatch(
            rows=tuple(rows),
            bucket=self._buckets.denoise(len(rows)),
            # Only one step where a context waits: its row leaves a place empty.
            max_steps=1 if any(map(_needs_encoding, running)) else self._decode_steps,
        )


def _needs_encoding(request: Request) -> bool:
    return request.held.context_len < request.num_tokens


def _append(request: Request, block: CommittedBlock) -> list[int]:
    request.num_blocks += 1
    return request.extend(block.tokens, block.steps, block.logprobs)


def _check_options(request: Request) -> None:
    sampling = request.sampling
    asked = [name for name in _NEED_LOGITS if getattr(sampling, name)]
    if (sampling.repetition_penalty or 1) != 1:
        asked.append("repetition_penalty")
    for name in asked:
        raise errors.RequestError(
            f"{name}={errors.quote(getattr(sampling, name))} is not supported by "
            f"{sampling.dllm.algorithm}, which draws from the model's own logits; leave it out",
            param=name,
        )
    if sampling.shows_steps:
        raise errors.RequestError(
            f"stream_mode 'denoise' is not supported by {sampling.dllm.algorithm}: its canvases "
            "hold random tokens; leave it out",
            param="dllm.stream_mode",
        )
