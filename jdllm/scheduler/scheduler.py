"""Decides what the next launch holds, and turns its results into committed tokens.

A round is `schedule` -> `Runner.launch` -> `process_results`; requests may arrive and be
aborted at any point between these calls, and the next round may be scheduled and
launched before the results of this one are processed: launches run in their order, so
what a later one finds in pages and slots does not depend on when the host looks.

Each running request is in one of two phases, read off its state: PREFILL while whole
committed blocks lack K,V in its pages, then DECODE, block after block in its slot. When
both kinds wait, prefill goes first, for rows that wait for it leave places empty; after the
launch that reaches `max_prefill_tokens` decode has a turn, of one step, so neither starves.

Why nothing hangs: pages for all committed tokens and one block are taken on
admission, so only decode rows ask for more; the request that arrived first takes
them from the one that arrived last, and `add_request` refuses what could not run
alone in the whole pool.
"""

from __future__ import annotations

import bisect
import logging
import time

from jdllm import errors
from jdllm.kv_cache import prefix_cache as prefix_cache_lib
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import finish as finish_lib
from jdllm.scheduler import limits as limits_lib
from jdllm.scheduler import outputs as outputs_lib
from jdllm.scheduler import pages as pages_lib
from jdllm.scheduler import policy as policy_lib
from jdllm.scheduler import request as request_lib
from jdllm.scheduler import stats as stats_lib

logger = logging.getLogger(__name__)

RequestState = request_lib.RequestState


class Scheduler:
    """Holds every live request: `waiting` and `running`, both in order of arrival."""

    def __init__(
        self,
        *,
        block_size: int,
        page_size: int,
        num_pages: int,
        max_running_requests: int,
        max_queued_requests: int | None,
        context_length: int,
        buckets: buckets_lib.Buckets,
        prefill_token_budget: int,
        max_prefill_tokens: int,
        policy: policy_lib.Policy,
        prefix_cache: prefix_cache_lib.PrefixCache | None,
        detokenize: finish_lib.Detokenize | None,
        decode_steps: int = 1,
        launches_ahead: int = 0,
    ):
        limits_lib.check_sizes(block_size, page_size, max_running_requests, buckets, prefix_cache)
        self.waiting: list[request_lib.Request] = []
        self.running: list[request_lib.Request] = []
        self.pages = pages_lib.RequestPages(
            num_pages=num_pages,
            page_size=page_size,
            block_size=block_size,
            prefix_cache=prefix_cache,
        )
        self._by_id: dict[str, request_lib.Request] = {}
        self._block_size = block_size
        self._max_running = max_running_requests
        self._max_queued = max_queued_requests
        self._limits = limits_lib.Limits(
            context_length=context_length,
            block_size=block_size,
            page_size=page_size,
            num_pages=num_pages,
            has_tokenizer=detokenize is not None,
        )
        self._buckets = buckets
        budget = min(prefill_token_budget, buckets.prefill_tokens[-1])
        self._prefill_blocks = max(1, budget // block_size)
        self._policy: policy_lib.Policy = policy
        self._detokenize = detokenize
        self._decode_steps = decode_steps
        # A launch is planned while so many others, whose blocks are not known yet, run.
        self._blocks_ahead = decode_steps * (1 + launches_ahead)
        self._free_slots = list(reversed(range(max_running_requests)))
        self._max_prefill_tokens = max_prefill_tokens
        self._prefilled_in_a_row = 0
        self._num_arrivals = 0
        self._total_prompt_tokens = 0
        self._total_cached_tokens = 0
        self._total_preemptions = 0

    def add_request(self, request: request_lib.Request, *, is_bounded: bool = True) -> None:
        """Queues a request; raises a `RequestError` for what can never run, or no room.

        `is_bounded`: the queue limit applies (a server's traffic, not an offline list).
        """
        if request.request_id in self._by_id:
            raise errors.RequestError(f"request id {request.request_id!r} is in use", param="rid")
        self._limits.check(request)
        if is_bounded:
            self._check_queue()
        request.arrival = self._num_arrivals
        request.state = RequestState.WAITING
        self._num_arrivals += 1
        self._by_id[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any phase and frees what it holds; False if it is not live."""
        request = self._by_id.get(request_id)
        if request is None:
            return False
        if request.state is RequestState.RUNNING:
            self._leave(request, keep=False)
        else:
            self.waiting.remove(request)
        self._end(request)
        return True

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> batch_lib.ScheduleBatch | None:
        """Admits what fits and returns the next launch; None only when no request is live."""
        self._admit()
        plans = [self._prefill, self._decode]
        if self._prefilled_in_a_row >= self._max_prefill_tokens:
            plans.reverse()
        for plan in plans:
            batch = plan()
            if batch is not None:
                return batch
        assert not self.has_work(), f"no launch for {self.stats()}"
        return None

    def process_results(
        self, batch: batch_lib.ScheduleBatch, result: batch_lib.LaunchResult
    ) -> list[outputs_lib.RequestOutput]:
        """Applies a launch; returns what each row committed.

        Rows whose request has left since the launch was planned are skipped, also when it
        came back: it began anew.
        """
        outputs: list[outputs_lib.RequestOutput] = []
        if batch.phase is batch_lib.Phase.PREFILL:
            for row in filter(is_current, batch.rows):
                self.pages.publish(row.request)
            return outputs
        for row, row_result in zip(batch.rows, result.rows, strict=True):
            if is_current(row):
                self._apply_guarded(row.request, row_result, outputs)
        return outputs

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while requests run."""
        if self.running:
            return False
        self.pages.flush()
        return True

    def drop_kv(self) -> None:
        """Forgets all K,V after the pool was lost: running requests start over, cache empties.

        Committed tokens stay; they are prefilled again.
        """
        for request in list(self.running):
            self._preempt(request, keep=False)
        self.pages.flush()

    def stats(self) -> stats_lib.SchedulerStats:
        num_pages, num_used = self.pages.allocator.num_pages, self.pages.num_used
        cache = self.pages.prefix_cache
        return stats_lib.SchedulerStats(
            num_running=len(self.running),
            num_queued=len(self.waiting),
            num_pages=num_pages,
            num_used_pages=num_used,
            num_cached_pages=0 if cache is None else cache.num_nodes,
            token_usage=num_used / num_pages,
            total_prompt_tokens=self._total_prompt_tokens,
            total_cached_tokens=self._total_cached_tokens,
            total_preemptions=self._total_preemptions,
        )

    def _check_queue(self) -> None:
        # A request that finds a row free at the next round does not count as queued.
        free_rows = self._max_running - len(self.running)
        if self._max_queued is not None and len(self.waiting) >= self._max_queued + free_rows:
            raise errors.QueueFull(
                f"the queue is full: {len(self.waiting)} requests wait and {self._max_queued} may; "
                "retry later"
            )

    def _admit(self) -> None:
        if not self.waiting or len(self.running) >= self._max_running:
            return
        order = policy_lib.admission_order(self.waiting, self._policy, self.pages.cached_prefix_len)
        for request in order[: self._max_running - len(self.running)]:
            # No overtaking: a small request must not keep a large one waiting for ever.
            if not self.pages.admit(request):
                return
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_arrival)
            request.state = RequestState.RUNNING
            request.slot = self._free_slots.pop()
            if request.first_scheduled_s is None:
                request.first_scheduled_s = time.monotonic()
                request.cached_tokens = request.context_len
                self._total_prompt_tokens += len(request.prompt_ids)
                self._total_cached_tokens += request.cached_tokens

    def _prefill(self) -> batch_lib.ScheduleBatch | None:
        """Packs whole committed blocks of the oldest requests up to the token budget."""
        rows: list[batch_lib.ScheduledRow] = []
        budget = self._prefill_blocks * self._block_size
        for request in self.running:
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
        rows: list[batch_lib.ScheduledRow] = []
        for request in [r for r in self.running if not self._needs_prefill(r)]:
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
            max_steps=1 if any(map(self._needs_prefill, self.running)) else self._decode_steps,
            # Not at the first one: where rows finish often, launches would be of one step.
            max_finished=len(rows) // 8 if self.waiting else None,
        )

    def _look_ahead(self, requests: list[request_lib.Request]) -> None:
        """Gets pages for blocks that may follow in the launch; few where some wait for pages."""
        lacks_pages = bool(self.waiting) and len(self.running) < self._max_running
        blocks = 1 if lacks_pages else self._blocks_ahead
        self.pages.grow_ahead(requests, blocks, keep_free=len(self.running))

    def _needs_prefill(self, request: request_lib.Request) -> bool:
        # A block whose tokens are committed but not persisted stays a decode row.
        return not request.is_decoding and request.context_len < request.whole_len(self._block_size)

    def _reserve_block(self, request: request_lib.Request) -> bool:
        """Gets pages for the in-flight block, preempting the youngest; False if it is that."""
        if request.state is not RequestState.RUNNING:
            return False
        while not self.pages.grow(request, request.context_len + self._block_size):
            victim = self.running[-1]
            self._preempt(victim, keep=True)
            if victim is request:
                return False
        return True

    def _preempt(self, request: request_lib.Request, *, keep: bool) -> None:
        """Sends a request back to the queue with its committed tokens and nothing else."""
        self._leave(request, keep=keep)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._total_preemptions += 1
        bisect.insort(self.waiting, request, key=_arrival)

    def _apply_guarded(
        self,
        request: request_lib.Request,
        result: batch_lib.RowResult,
        outputs: list[outputs_lib.RequestOutput],
    ) -> None:
        """Ends a request whose own processing fails (its stop strings, say), and no other."""
        try:
            self._apply(request, result, outputs)
        except Exception as error:  # law 6: a fault in one request never touches another
            logger.exception("request %s ends by a fault of its own", request.request_id)
            outputs.append(self._give_up(request, f"{type(error).__name__}: {error}"))

    def _apply(
        self,
        request: request_lib.Request,
        result: batch_lib.RowResult,
        outputs: list[outputs_lib.RequestOutput],
    ) -> None:
        """Stores one decode row's launch; its blocks are one output."""
        nfe, new = request.nfe, []
        request.num_edited += result.num_edited
        for done, committed in enumerate(result.committed, start=1):
            request.nfe = nfe + committed.nfe
            kept, finish = self._commit(request, committed)
            new += kept
            if finish is not None:
                request.num_discarded += (len(result.committed) - done) * self._block_size
                outputs.append(outputs_lib.RequestOutput.of(request, new, finish))
                return
        request.nfe = nfe + result.nfe
        if new:
            outputs.append(outputs_lib.RequestOutput.of(request, new))
        if result.is_invalid:
            outputs.append(self._give_up(request, "the model's logits are not numbers (NaN)"))
            return
        request.context_len = result.context_len
        self.pages.publish(request)

    def _commit(
        self, request: request_lib.Request, block: batch_lib.CommittedBlock
    ) -> tuple[list[int], outputs_lib.FinishReason | None]:
        """Appends a block's tokens; a finished request leaves at once, without persisting it."""
        start = request.whole_len(self._block_size)
        head = request.num_tokens - start  # the prompt's tokens in its last block
        new = block.tokens[head:].tolist()
        request.context_len = start  # what came before is persisted, or this block could not be
        request.num_blocks += 1
        request.output_ids += new
        request.output_steps += block.steps[head:].tolist()
        request.output_logprobs += block.logprobs[head:].tolist()
        finish = finish_lib.check_request(request, len(new), self._detokenize)
        if finish is None:
            return new, None
        surplus = len(request.output_ids) - finish.finished_len
        request.num_discarded += surplus
        for kept in (request.output_ids, request.output_steps, request.output_logprobs):
            del kept[finish.finished_len :]
        self._leave(request, keep=True)
        self._end(request)
        return new[: len(new) - surplus], finish

    def _give_up(self, request: request_lib.Request, message: str) -> outputs_lib.RequestOutput:
        """Ends a request that cannot go on; nothing more of it enters the prefix cache."""
        if request.state is RequestState.RUNNING:
            self._leave(request, keep=False)
            self._end(request)
        reason = outputs_lib.FinishReason(
            kind="abort", finished_len=len(request.output_ids), message=message
        )
        return outputs_lib.RequestOutput.of(request, [], reason)

    def _leave(self, request: request_lib.Request, *, keep: bool) -> None:
        """Takes slot, pages and in-flight block from a running request."""
        assert request.slot is not None
        self.running.remove(request)
        self.pages.release(request, keep=keep)
        self._free_slots.append(request.slot)
        request.slot = None
        request.is_decoding = False
        request.epoch += 1

    def _end(self, request: request_lib.Request) -> None:
        del self._by_id[request.request_id]
        request.state = RequestState.FINISHED


def is_current(row: batch_lib.ScheduledRow) -> bool:
    """Returns whether the row's request still holds the place that the launch was planned for."""
    return row.request.state is RequestState.RUNNING and row.request.epoch == row.epoch


def _arrival(request: request_lib.Request) -> int:
    return request.arrival
