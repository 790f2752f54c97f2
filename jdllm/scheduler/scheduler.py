"""Decides what the next launch holds, and turns its results into committed tokens.

A round is `schedule` -> `Runner.launch` -> `process_results`; requests may arrive and be
aborted at any point between these calls, and the next round may be scheduled and
launched before the results of this one are processed: launches run in their order, so
what a later one finds in pages and slots does not depend on when the host looks.

What a running request needs and what a launch of it is differs between models that write
block after block (`block_rows`) and models that see a whole canvas (`canvas_rows`); the
buckets say which. Queue, order, ends and aborts are the same.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Protocol

from jdllm import errors
from jdllm.kv_cache import prefix_cache as prefix_cache_lib
from jdllm.scheduler import batch as batch_lib
from jdllm.scheduler import buckets as buckets_lib
from jdllm.scheduler import commits as commits_lib
from jdllm.scheduler import finish as finish_lib
from jdllm.scheduler import limits as limits_lib
from jdllm.scheduler import live_requests
from jdllm.scheduler import pages as pages_lib
from jdllm.scheduler import policy as policy_lib
from jdllm.scheduler import request as request_lib
from jdllm.scheduler import stats as stats_lib
from jdllm.scheduler.rows import block as block_rows
from jdllm.scheduler.rows import canvas as canvas_rows

logger = logging.getLogger(__name__)

RequestState = request_lib.RequestState


class Rows(Protocol):
    """How running requests become launches, and what a launch gives becomes their output."""

    def prepare(self, request: request_lib.Request) -> None:
        """Readies a new request; raises a `RequestError` if it could not finish alone."""
        ...

    def admit(self, request: request_lib.Request) -> bool:
        """Takes what a waiting request needs to run; False, and nothing changed, without it."""
        ...

    def plan(self) -> batch_lib.ScheduleBatch | None:
        """Returns the next launch; None only when nothing runs."""
        ...

    def append(self, request: request_lib.Request, block: batch_lib.CommittedBlock) -> list[int]:
        """Stores what a row committed and returns the tokens that are new output."""
        ...


class Scheduler:
    """Holds every live request: `waiting` and `running`, both in order of arrival.

    The two prefill sizes and `launches_ahead` concern models that write block after block.
    """

    def __init__(
        self,
        *,
        block_size: int,
        page_size: int,
        num_pages: int,
        max_running_requests: int,
        max_queued_requests: int | None,
        context_length: int,
        buckets: buckets_lib.Buckets | buckets_lib.CanvasBuckets,
        prefill_token_budget: int,
        max_prefill_tokens: int,
        policy: policy_lib.Policy,
        prefix_cache: prefix_cache_lib.PrefixCache | None,
        detokenize: finish_lib.Detokenize | None,
        decode_steps: int = 1,
        launches_ahead: int = 0,
    ):
        limits_lib.check_sizes(block_size, page_size, max_running_requests, buckets, prefix_cache)
        self.pages = pages_lib.RequestPages(
            num_pages=num_pages,
            page_size=page_size,
            block_size=block_size,
            prefix_cache=prefix_cache,
        )
        self.live = live_requests.LiveRequests(max_running=max_running_requests, pages=self.pages)
        limits = limits_lib.Limits(
            context_length=context_length,
            block_size=block_size,
            page_size=page_size,
            num_pages=num_pages,
            has_tokenizer=detokenize is not None,
        )
        self._rows: Rows
        match buckets:
            case buckets_lib.Buckets():
                self._rows = block_rows.BlockRows(
                    self.live,
                    limits,
                    buckets,
                    prefill_token_budget=prefill_token_budget,
                    max_prefill_tokens=max_prefill_tokens,
                    decode_steps=decode_steps,
                    launches_ahead=launches_ahead,
                )
            case buckets_lib.CanvasBuckets():
                self._rows = canvas_rows.CanvasRows(
                    self.live, limits, buckets, decode_steps=decode_steps
                )
        self._max_queued = max_queued_requests
        self._policy: policy_lib.Policy = policy
        self._detokenize = detokenize
        self._total_prompt_tokens = 0
        self._total_cached_tokens = 0

    @property
    def waiting(self) -> list[request_lib.Request]:
        return self.live.waiting

    @property
    def running(self) -> list[request_lib.Request]:
        return self.live.running

    def add_request(self, request: request_lib.Request, *, is_bounded: bool = True) -> None:
        """Queues a request; raises a `RequestError` for what can never run, or no room.

        `is_bounded`: the queue limit applies (a server's traffic, not an offline list).
        """
        if request.request_id in self.live.by_id:
            raise errors.RequestError(f"request id {request.request_id!r} is in use", param="rid")
        self._rows.prepare(request)
        if is_bounded:
            self._check_queue()
        self.live.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any phase and frees what it holds; False if it is not live."""
        request = self.live.by_id.get(request_id)
        if request is None:
            return False
        self.live.end(request, keep=False)
        return True

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> batch_lib.ScheduleBatch | None:
        """Admits what fits and returns the next launch; None only when no request is live."""
        self._admit()
        batch = self._rows.plan()
        assert batch is not None or not self.has_work(), f"no launch for {self.stats()}"
        return batch

    def process_results(
        self, batch: batch_lib.ScheduleBatch, result: batch_lib.LaunchResult
    ) -> list[commits_lib.RequestCommit]:
        """Applies a launch; returns what each row committed.

        Rows whose request has left since the launch was planned are skipped, also when it
        came back: it began anew.
        """
        outputs: list[commits_lib.RequestCommit] = []
        if batch.phase is batch_lib.Phase.PREFILL:
            for row in filter(is_current, batch.rows):
                self.pages.publish(row.request)
            return outputs
        for row, row_result in zip(batch.rows, result.rows, strict=True):
            if is_current(row):
                self._apply_guarded(row.request, row_result, outputs)
        return outputs

    def steps_left(self, batch: batch_lib.ScheduleBatch) -> float:
        """Returns within how many steps a launch of canvases should end all that is live.

        At the pace of the rows' last results; infinite where one's is unknown, where requests live
        that are not in it, and for models whose tokens come in whole blocks, at no even pace.
        """
        rows = [row.request for row in batch.rows if is_current(row)]
        if batch.phase is not batch_lib.Phase.CANVAS or len(rows) < len(self.live.by_id):
            return math.inf
        return max((request.steps_left for request in rows), default=0.0)

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while requests run."""
        if self.running:
            return False
        self.pages.flush()
        return True

    def drop_kv(self) -> None:
        """Forgets all K,V after the pool was lost: running requests start over, cache empties.

        Committed tokens stay; they are prefilled again, or given on the canvas.
        """
        for request in list(self.running):
            self.live.preempt(request, keep=False)
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
            total_preemptions=self.live.total_preemptions,
        )

    def _check_queue(self) -> None:
        # A request that finds a row free at the next round does not count as queued.
        free_rows = self.live.num_free_rows
        if self._max_queued is not None and len(self.waiting) >= self._max_queued + free_rows:
            raise errors.QueueFull(
                f"the queue is full: {len(self.waiting)} requests wait and {self._max_queued} may; "
                "retry later"
            )

    def _admit(self) -> None:
        free_rows = self.live.num_free_rows
        if not self.waiting or not free_rows:
            return
        order = policy_lib.admission_order(self.waiting, self._policy, self.pages.cached_prefix_len)
        for request in order[:free_rows]:
            # No overtaking: a small request must not keep a large one waiting for ever.
            if not self._rows.admit(request):
                return
            self.live.start(request)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = time.monotonic()
                request.cached_tokens = request.context_len
                self._total_prompt_tokens += len(request.prompt_ids)
                self._total_cached_tokens += request.cached_tokens

    def _apply_guarded(
        self,
        request: request_lib.Request,
        result: batch_lib.RowResult,
        outputs: list[commits_lib.RequestCommit],
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
        outputs: list[commits_lib.RequestCommit],
    ) -> None:
        """Stores one decode row's launch; its blocks are one output."""
        nfe, new, known = request.nfe, [], len(request.output_ids)
        request.num_edited += result.num_edited
        for done, committed in enumerate(result.committed, start=1):
            request.nfe = nfe + committed.nfe
            kept, finish = self._commit(request, committed)
            new += kept
            if finish is not None:
                request.num_discarded += sum(len(c.tokens) for c in result.committed[done:])
                outputs.append(commits_lib.RequestCommit.of(request, new, finish))
                return
        request.nfe = nfe + result.nfe
        # What is new to the host: a row that began anew reports its earlier tokens again.
        request.tokens_per_step = (len(request.output_ids) - known) / max(result.nfe, 1)
        if new:
            outputs.append(commits_lib.RequestCommit.of(request, new))
        if result.is_invalid:
            outputs.append(self._give_up(request, "the model's logits are not numbers (NaN)"))
            return
        request.context_len = result.context_len
        self.pages.publish(request)

    def _commit(
        self, request: request_lib.Request, block: batch_lib.CommittedBlock
    ) -> tuple[list[int], commits_lib.FinishReason | None]:
        """Appends what became final; a finished request leaves at once, nothing is persisted."""
        new = self._rows.append(request, block)
        finish = finish_lib.check_request(request, len(new), self._detokenize)
        if finish is None:
            return new, None
        surplus = len(request.output_ids) - finish.finished_len
        request.num_discarded += surplus
        request.truncate(finish.finished_len)
        self.live.end(request, keep=True)
        return new[: len(new) - surplus], finish

    def _give_up(self, request: request_lib.Request, message: str) -> commits_lib.RequestCommit:
        """Ends a request that cannot go on; nothing more of it enters the prefix cache."""
        if request.state is RequestState.RUNNING:
            self.live.end(request, keep=False)
        reason = commits_lib.FinishReason(
            kind="abort", finished_len=len(request.output_ids), message=message
        )
        return commits_lib.RequestCommit.of(request, [], reason)


def is_current(row: batch_lib.ScheduledRow) -> bool:
    """Returns whether the row's request still holds the place that the launch was planned for."""
    return row.request.state is RequestState.RUNNING and row.request.epoch == row.epoch
