"""Rows that write block after block: whole committed blocks are prefilled, the next is decoded.

Each running request is in one of two phases, read off its state: PREFILL while whole
committed blocks lack K,V in its pages, then DECODE, block after block in its slot. When
both kinds wait, prefill goes first, for rows that wait for it leave places empty; after the
launch that reaches `max_prefill_tokens` decode has a turn, of one step, so neither starves.

Why nothing hangs: pages for all committed tokens and one block are taken on
admission, so only decode rows ask for more; the request that arrived first takes
them from the one that arrived last, and `check` refuses what could not run
alone in the whole pool.
"""

from __future__ import annotations

from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import limits as limits_lib
from jdllm.scheduler import live_requests
from jdllm.scheduler import request as request_lib


class BlockRows:
    """Plans prefill and decode launches of the running requests, and takes in their blocks."""

    def __init__(
        self,
        live: live_requests.LiveRequests,
        limits: limits_lib.Limits,
        buckets: buckets_lib.Buckets,
        *,
        prefill_token_budget: int,
        max_prefill_tokens: int,
        decode_steps: int,
        launches_ahead: int,
    ):
        self._live = live
        self._limits = limits
        self._buckets = buckets
        self._block_size = buckets.block_size
        budget = min(prefill_token_budget, buckets.prefill_tokens[-1])
        self._prefill_blocks = max(1, budget // self._block_size)
        self._max_prefill_tokens = max_prefill_tokens
        self._decode_steps = decode_steps
        # A launch is planned while so many others, whose blocks are not known yet, run.
        self._blocks_ahead = decode_steps * (1 + launches_ahead)
        self._prefilled_in_a_row = 0

    def prepare(self, request: request_lib.Request) -> None:
        """Raises a `RequestError` for a request that could not finish alone in the pool."""
        self._limits.check(request)
        limits_lib.check_open_ended(request)
        longest = len(request.prompt_ids) + request.max_new_tokens
        self._limits.check_pages(request, -(-longest // self._block_size) * self._block_size)

    def admit(self, request: request_lib.Request) -> bool:
        """Takes the pages a request begins with; False, and nothing changed, without them."""
        return self._live.pages.admit(request)

    def plan(self) -> batch_lib.ScheduleBatch | None:
        """Returns the next launch, of either phase; None when nothing runs."""
        plans = [self._prefill, self._decode]
        if self._prefilled_in_a_row >= self._max_prefill_tokens:
            plans.reverse()
        for plan in plans:
            batch = plan()
            if batch is not None:
                return batch
        return None

    def append(self, request: request_lib.Request, block: batch_lib.CommittedBlock) -> list[int]:
        """Stores a block's tokens and returns those that are output."""
        start = request.whole_len(self._block_size)
        head = request.num_tokens - start  # the prompt's tokens in its last block
        request.context_len = start  # what came before is persisted, or this block could not be
        request.num_blocks += 1
        return request.extend(block.tokens[head:], block.steps[head:], block.logprobs[head:])

    def _prefill(self) -> batch_lib.ScheduleBatch | None:
        """Packs whole committed blocks of the oldest requests up to the token budget."""
        rows: list[batch_lib.ScheduledRow] = []
        budget = self._prefill_blocks * self._block_size
        for request in self._live.running:
            if budget == 0 or len(rows) == self._buckets.prefill_rows:
                break
            if self._needs_prefill(request):
                start = request.context_len
                count = min(request.whole_len(self._block_size) - start, budget)
                rows.append(
                    batch_lib.ScheduledRow(
                        request=request, start=start, num_tokens=count, epoch=request.epoch
                    )
                )
                budget -= count
                request.context_len += count  # whoever reads their K,V runs in a later launch
        if not rows:
            return None
        tokens = sum(row.num_tokens for row in rows)
        bucket = self._buckets.prefill(len(rows), tokens)
        self._prefilled_in_a_row += bucket.tokens  # what decode waits for, padding included
        return batch_lib.ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _decode(self) -> batch_lib.ScheduleBatch | None:
        """Takes one block of every request that is past its prefill and gets its pages.

        Blocks that may follow within the launch get pages too, as far as pages are free.
        """
        running = self._live.running
        rows: list[batch_lib.ScheduledRow] = []
        for request in [r for r in running if not self._needs_prefill(r)]:
            if not self._reserve_block(request):
                break  # It was the youngest: none follows.
            rows.append(
                batch_lib.ScheduledRow(
                    request=request,
                    start=request.context_len,
                    num_tokens=self._block_size,
                    epoch=request.epoch,
                    is_fresh=not request.is_decoding,
                )
            )
        if not rows:
            return None
        self._prefilled_in_a_row = 0
        for row in rows:
            row.request.is_decoding = True
        self._look_ahead([row.request for row in rows])
        return batch_lib.ScheduleBatch(
            rows=tuple(rows),
            bucket=self._buckets.decode(len(rows)),
            # Prompts wait a step, not a launch: rows that wait for theirs leave places empty.
            max_steps=1 if any(map(self._needs_prefill, running)) else self._decode_steps,
            max_finished=self._live.max_finished(len(rows)),
        )

    def _look_ahead(self, requests: list[request_lib.Request]) -> None:
        """Gets pages for blocks that may follow in the launch; few where some wait for pages."""
        lacks_pages = bool(self._live.waiting) and self._live.num_free_rows > 0
        blocks = 1 if lacks_pages else self._blocks_ahead
        self._live.pages.grow_ahead(requests, blocks, keep_free=len(self._live.running))

    def _needs_prefill(self, request: request_lib.Request) -> bool:
        # A block whose tokens are committed but not persisted stays a decode row.
        return not request.is_decoding and request.context_len < request.whole_len(self._block_size)

    def _reserve_block(self, request: request_lib.Request) -> bool:
        """Gets pages for the in-flight block, preempting the youngest; False if it is that."""
        if request.state is not request_lib.RequestState.RUNNING:
            return False
        while not self._live.pages.grow(request, request.context_len + self._block_size):
            victim = self._live.running[-1]
            self._live.preempt(victim, keep=True)
            if victim is request:
                return False
        return True
