"""Rows that write block after block: they prefill whole committed blocks and decode the next one.

A running request has two phases, which follow from its state: prefill while whole committed
blocks lack K,V in its pages, then decode, block after block in its slot. When requests of both
phases wait, prefill goes first, because rows that wait for it leave places of a decode launch
empty. After the launch that reaches `max_prefill_tokens`, decode gets a turn of one step. So
neither phase starves.

Why nothing hangs: admission takes pages for all committed tokens and one block, so only decode
rows ask for more pages. If none are free, the request that arrived last is preempted. And
`prepare` refuses requests that could not run alone in the whole pool.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

from jdllm import errors
from jdllm.algorithms import limits, lookup
from jdllm.scheduler import sizes
from jdllm.scheduler.batch import Bucket, CommittedBlock, RowResult, ScheduleBatch, ScheduledRow
from jdllm.scheduler.commits import Progress
from jdllm.scheduler.limits import check_open_ended
from jdllm.scheduler.request import Request, RequestState
from jdllm.scheduler.rows import interface, tokens
from jdllm.scheduler.stay import Stay


class PrefillBucket(Bucket):
    """Whole committed blocks of up to `rows` requests, packed into `tokens`."""

    name = "prefill"
    denoises = False


class DecodeBucket(Bucket):
    """Denoising steps of `rows` rows, one block each."""

    name = "decode"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockBuckets:
    """Ascending sizes: rows of a decode launch, tokens and rows of a prefill launch."""

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("decode_rows", "prefill_tokens"):
            sizes.check_ascending(name, getattr(self, name))
        if self.block_size < 1 or self.prefill_rows < 1:
            raise errors.ConfigError(
                f"{self.block_size=} and {self.prefill_rows=} must be positive"
            )
        if any(tokens % self.block_size for tokens in self.prefill_tokens):
            raise errors.ConfigError(
                f"{self.prefill_tokens=} must be multiples of {self.block_size=}"
            )

    @property
    def max_rows(self) -> int:
        return self.decode_rows[-1]

    @classmethod
    def default(
        cls,
        max_running_requests: int,
        prefill_token_budget: int,
        block_size: int,
        *,
        padding_is_cheap: bool = False,
    ) -> BlockBuckets:
        """Builds decode sizes (powers of two) and prefill sizes (the budget, halved repeatedly).

        Where `padding_is_cheap` (a GPU, bound by the weights it reads), up to `FEW_TOKENS` only
        every other power of two is a decode size.
        """
        powers = sizes.powers_of_two(max_running_requests)
        if padding_is_cheap:
            powers = [
                rows
                for i, rows in enumerate(powers)
                if i % 2 == 0 or rows * block_size > sizes.FEW_TOKENS
            ]
        return cls(
            decode_rows=tuple(sorted({*powers, max_running_requests})),
            prefill_tokens=sizes.halvings(prefill_token_budget, block_size),
            prefill_rows=max_running_requests,
            block_size=block_size,
        )

    def all(self) -> list[Bucket]:
        """Returns every bucket to compile."""
        prefill = [self.prefill(1, tokens) for tokens in self.prefill_tokens]
        decode = [self.decode(rows) for rows in self.decode_rows]
        return prefill + decode + [self.decode(n, with_logits=True) for n in self.logit_rows]

    @property
    def logit_rows(self) -> tuple[int, ...]:
        """Rows of decode launches with logits: every other size, since few requests need them."""
        return self.decode_rows[::-2][::-1]

    def decode(self, rows: int, *, with_logits: bool = False) -> Bucket:
        """Returns the smallest bucket that holds `rows` rows of one block each."""
        rows = sizes.smallest(self.logit_rows if with_logits else self.decode_rows, rows, "rows")
        return DecodeBucket(rows=rows, tokens=rows * self.block_size, with_logits=with_logits)

    def prefill(self, rows: int, tokens: int) -> Bucket:
        """Returns the smallest bucket that holds `tokens` tokens of `rows` requests."""
        sizes.smallest((self.prefill_rows,), rows, "rows")
        return PrefillBucket(
            rows=self.prefill_rows,
            tokens=sizes.smallest(self.prefill_tokens, tokens, "tokens"),
        )


class BlockRows:
    """Plans prefill and decode launches of the running requests, and stores their blocks."""

    defaults: ClassVar[interface.RowDefaults] = interface.RowDefaults(
        cpu_rows=8, accelerator_rows=64, shares_prefixes=True
    )

    def __init__(self, config: interface.RowConfig, buckets: BlockBuckets):
        _check_sizes(config, buckets)
        self.live = config.live_requests()
        self._limits = config.limits
        self._detokenize = config.detokenize
        self._buckets = buckets
        self._block_size = buckets.block_size
        self._is_causal = config.is_causal
        budget = min(config.prefill_token_budget, buckets.prefill_tokens[-1])
        self._prefill_blocks = max(1, budget // self._block_size)
        self._max_prefill_tokens = config.max_prefill_tokens
        self._decode_steps = config.decode_steps
        # `launches_ahead` other launches, whose blocks are not known yet, run while one is planned.
        self._blocks_ahead = config.decode_steps * (1 + config.launches_ahead)
        self._prefilled_in_a_row = 0

    @classmethod
    def build(cls, config: interface.RowConfig) -> Self:
        """Returns rows with the buckets that suit the device."""
        buckets = BlockBuckets.default(
            config.max_running_requests,
            config.prefill_token_budget,
            config.block_size,
            padding_is_cheap=config.device.padding_is_cheap,
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
        """Returns how many tokens remain in the context and in the whole blocks of the pool."""
        block_size = block_length or self._block_size
        # If a page is smaller than a block, the last pages of the pool may hold no whole block.
        pool = self._limits.pool_tokens // block_size * block_size
        if self._is_causal:
            pool = self._limits.pool_tokens - self._block_size + 1
        return max(1, min(self._limits.context_length, pool) - prompt_len)

    def prepare(self, request: Request) -> None:
        """Raises a `RequestError` for a request that could not finish alone in the pool."""
        self._limits.check(request)
        check_open_ended(request)
        _check_options(request, is_causal=self._is_causal)
        longest = len(request.prompt_ids) + request.max_new_tokens
        whole = sizes.in_units(longest, self._block_size)
        # Where blocks begin anywhere, one may begin at the last token.
        most = longest - 1 + self._block_size if self._is_causal else whole
        self._limits.check_pages(request, most)

    def admit(self, request: Request) -> Stay | interface.Refusal:
        """Takes the first pages of a request; if too few are free, changes nothing."""
        stay = Stay(slot=self.live.next_slot)
        is_admitted = self.live.pages.admit(request, stay)
        return stay if is_admitted else interface.Refusal.NO_ROOM

    def plan(self) -> ScheduleBatch | None:
        """Returns the next launch, of either phase; None if no request runs."""
        plans = [self._prefill, self._decode]
        if self._prefilled_in_a_row >= self._max_prefill_tokens:
            plans.reverse()
        for plan in plans:
            batch = plan()
            if batch is not None:
                return batch
        return None

    def apply(self, request: Request, result: RowResult) -> Progress:
        """Stores the blocks that became final, if any; says whether one of them ends the output."""
        return tokens.apply(request, result, self._append, self._detokenize)

    def settle(self, request: Request, result: RowResult) -> None:
        """Stores how far K,V is final, and offers full pages to the prefix cache."""
        if result.context_len is not None:
            request.held.context_len = result.context_len
        self.live.pages.publish(request)

    def steps_left(self, request: Request) -> float:
        """Returns infinity: blocks take an unpredictable number of steps."""
        del request
        return math.inf

    def _append(self, request: Request, block: CommittedBlock) -> list[int]:
        """Stores a block's tokens and returns those that belong to the output."""
        request.num_blocks += 1
        if self._is_causal:
            # A rule that drafts may have the last token still without K,V.
            request.held.context_len = max(request.held.context_len, request.num_tokens - 1)
            start = request.num_tokens
        else:
            # Earlier blocks are persisted, otherwise this one could not be final.
            request.held.context_len = start = request.whole_len(self._block_size)
        head = request.num_tokens - start  # the prompt's tokens in its last block
        return request.extend(
            block.tokens[head:],
            block.steps[head:],
            block.logprobs[head:],
            block.top_tokens(slice(head, None), request.sampling.top_logprobs),
        )

    def _prefill(self) -> ScheduleBatch | None:
        """Packs whole committed blocks of the oldest requests, up to the token budget.

        Where the context is causal these are any number of tokens, padded to whole blocks.
        """
        rows: list[ScheduledRow] = []
        budget = self._prefill_blocks * self._block_size
        for request in self.live.running:
            if budget == 0 or len(rows) == self._buckets.prefill_rows:
                break
            if self._needs_prefill(request):
                stay = request.held
                start = stay.context_len
                count = min(self.live.pages.prefix_len(request) - start, budget)
                rows.append(ScheduledRow(request=request, stay=stay, start=start, num_tokens=count))
                budget -= sizes.in_units(count, self._block_size)
                stay.context_len += count  # whatever reads their K,V is a later launch
        if not rows:
            return None
        padded = sum(sizes.in_units(row.num_tokens, self._block_size) for row in rows)
        bucket = self._buckets.prefill(len(rows), padded)
        self._prefilled_in_a_row += bucket.tokens  # decode waits for all of these, padding included
        return ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _decode(self) -> ScheduleBatch | None:
        """Plans one block of every request that has finished its prefill, if pages allow.

        Blocks that may follow within the launch also get pages, as far as pages are free.
        """
        running = self.live.running
        rows: list[ScheduledRow] = []
        for request in [r for r in running if not self._needs_prefill(r)]:
            if request.state is not RequestState.RUNNING:
                break  # An older one needed its pages: no other follows.
            in_flight = request.held.context_len + self._block_size
            if not self.live.reserve(request, in_flight):
                break  # The request was the youngest.
            rows.append(
                ScheduledRow(
                    request=request,
                    stay=request.held,
                    start=request.held.context_len,
                    num_tokens=self._block_size,
                    is_fresh=request.held.is_fresh,
                )
            )
        if not rows:
            return None
        self._prefilled_in_a_row = 0
        for row in rows:
            row.stay.is_fresh = False
        self._look_ahead([row.request for row in rows])
        return ScheduleBatch(
            rows=tuple(rows),
            bucket=self._buckets.decode(
                len(rows), with_logits=any(row.request.sampling.needs_logits for row in rows)
            ),
            # Only one step where a prompt waits: rows without their prefill leave places empty.
            max_steps=1 if any(map(self._needs_prefill, running)) else self._decode_steps,
            max_finished=self.live.max_finished(len(rows)),
        )

    def _look_ahead(self, requests: list[Request]) -> None:
        """Takes pages for blocks that may follow in the launch; few if requests wait for pages."""
        lacks_pages = bool(self.live.waiting) and self.live.num_free_rows > 0
        blocks = 1 if lacks_pages else self._blocks_ahead
        self.live.pages.grow_ahead(requests, blocks, keep_free=len(self.live.running))

    def _needs_prefill(self, request: Request) -> bool:
        # A row whose last block is committed but not persisted is still a decode row.
        stay = request.held
        return stay.is_fresh and stay.context_len < self.live.pages.prefix_len(request)


def _check_options(request: Request, *, is_causal: bool) -> None:
    """Raises a `RequestError` for options that the model or the algorithm does not serve."""
    dllm = request.sampling.dllm
    limits.check_family(dllm.options, is_causal=is_causal)
    name = dllm.algorithm  # None only before defaults are filled in
    if request.sampling.shows_steps and name is not None and lookup.TABLE[name].drafts:
        raise errors.RequestError(
            f"stream_mode 'denoise' is not supported by {name}: its tokens are written "
            "once; leave it out",
            param="dllm.stream_mode",
        )


def _check_sizes(config: interface.RowConfig, buckets: BlockBuckets) -> None:
    """Raises a ConfigError for sizes that do not fit each other."""
    page_size, block_size = config.page_size, config.block_size
    if page_size % block_size and block_size % page_size:
        raise errors.ConfigError(f"{page_size=} and {block_size=} must divide one another")
    if buckets.block_size != block_size:
        raise errors.ConfigError(f"{buckets.block_size=} differs from {block_size=}")
