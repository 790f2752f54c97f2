"""Decides which requests the next launch runs, and turns its results into committed tokens.

A round is `schedule` -> `Runner.launch` -> `process_results`. Between these calls requests may
arrive and be aborted. The next round may be scheduled and launched before the results of this
one are processed: launches run in order, so the pages and slots that a later launch finds do
not depend on when the host reads results.

Kinds of rows (`scheduler/rows/`) differ in what a running request needs and in what a launch
does; the caller passes one in. Queue, order, ends and aborts are the same for all kinds.
"""

from __future__ import annotations

import functools
import logging
import math
import time

from jdllm import errors
from jdllm.scheduler import request as request_lib
from jdllm.scheduler.batch import LaunchResult, Pause, RowResult, ScheduleBatch
from jdllm.scheduler.commits import FinishReason, Progress, RequestCommit
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows import interface
from jdllm.scheduler.stats import SchedulerStats
from jdllm.scheduler.stay import Stay
from jdllm.scheduler.waiting import Policy, WaitingQueue

logger = logging.getLogger(__name__)

RequestState = request_lib.RequestState


class Scheduler:
    """Holds all live requests, `waiting` and `running`."""

    def __init__(
        self,
        rows: interface.Rows,
        *,
        max_queued_requests: int | None = None,
        policy: Policy = "fcfs",
    ):
        self.rows = rows
        self.live = rows.live
        self.pages = rows.live.pages
        if not 1 <= self.live.max_running <= rows.max_rows:
            raise errors.ConfigError(
                f"max_running_requests={self.live.max_running} must be between 1 and the largest "
                f"bucket of {rows.max_rows} rows"
            )
        self._max_queued = max_queued_requests
        self._policy: Policy = policy
        self._total_prompt_tokens = 0
        self._total_cached_tokens = 0

    @property
    def waiting(self) -> WaitingQueue:
        return self.live.waiting

    @property
    def running(self) -> list[Request]:
        return self.live.running

    def add_request(self, request: Request, *, is_bounded: bool = True) -> None:
        """Queues a request; raises a `RequestError` if it can never run or the queue is full.

        `is_bounded`: the queue limit applies (for a server's traffic, not for an offline list).
        """
        if request.request_id in self.live.by_id:
            raise errors.RequestError(
                f"request id {errors.quote(request.request_id)} is in use", param="rid"
            )
        self.rows.prepare(request)
        if is_bounded:
            self.check_room(1)
        self.live.add(request)

    def check_room(self, count: int) -> None:
        """Raises `QueueFull` unless the queue has room for `count` more requests now."""
        if self._max_queued is None:
            return
        # A request that gets a free row in the next round does not count as queued.
        if len(self.waiting) + count > self._max_queued + self.live.num_free_rows:
            raise errors.QueueFull(
                f"the queue is full: {len(self.waiting)} requests wait and {self._max_queued} may; "
                f"there is no room for {count} more, retry later"
            )

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state and frees what it holds; False if it is not live."""
        request = self.live.by_id.get(request_id)
        if request is None:
            return False
        self.live.end(request, keep=False)
        return True

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduleBatch | Pause | None:
        """Admits requests that fit and returns the next launch; None only if no request is live.

        Some kinds of rows may return a `Pause` instead.
        """
        self._admit()
        batch = self.rows.plan()
        assert batch is not None or not self.has_work(), f"no launch for {self.stats()}"
        return batch

    def process_results(self, batch: ScheduleBatch, result: LaunchResult) -> list[RequestCommit]:
        """Applies the results of a launch; returns what each row committed.

        Skips rows whose request has left since the launch was planned, even if it runs again,
        because then it has a new stay.
        """
        if isinstance(self.rows, interface.CanHalve):
            self.rows.note_good(batch)
        commits: list[RequestCommit] = []
        for row, row_result in zip(batch.rows, result.rows, strict=True):
            if row.is_current:
                self._apply_guarded(row.request, row_result, commits)
        return commits

    def steps_left(self, batch: ScheduleBatch) -> float:
        """Returns in how many steps a launch is expected to finish all live requests.

        Infinite if some live requests are not in the launch, or if the kind of rows cannot tell.
        """
        rows = [row.request for row in batch.rows if row.is_current]
        if not batch.bucket.denoises or len(rows) < len(self.live.by_id):
            return math.inf
        return max(map(self.rows.steps_left, rows), default=0.0)

    def flush_cache(self) -> bool:
        """Empties the caches; returns False and does nothing while requests run."""
        if self.running:
            return False
        self.live.flush()
        return True

    def halve(self, batch: ScheduleBatch) -> bool:
        """Makes launches smaller after one found too little memory; False if that is impossible."""
        return isinstance(self.rows, interface.CanHalve) and self.rows.halve(batch)

    def drop_kv(self) -> None:
        """Forgets all K,V after the pool was lost: preempts running requests, empties the caches.

        Committed tokens stay; they are prefilled again, or given on the canvas.
        """
        for request in list(self.running):
            self.live.preempt(request, keep=False)
        self.live.flush()

    def stats(self) -> SchedulerStats:
        num_pages, num_used = self.pages.allocator.num_pages, self.pages.num_used
        cache = self.pages.prefix_cache
        return SchedulerStats(
            num_running=len(self.running),
            num_queued=len(self.waiting),
            num_pages=num_pages,
            num_used_pages=num_used,
            num_cached_pages=0 if cache is None else cache.num_nodes,
            token_usage=num_used / num_pages if num_pages else 0.0,
            total_prompt_tokens=self._total_prompt_tokens,
            total_cached_tokens=self._total_cached_tokens,
            total_preemptions=self.live.total_preemptions,
        )

    def _admit(self) -> None:
        """Starts requests in the order of their turns; those that are not ready keep theirs."""
        prefix_len = functools.cache(self.pages.cached_prefix_len)
        passed: set[str] = set()  # the ids of those that were not ready in this round
        while self.live.num_free_rows:
            # From the first turn again, since an admission changes the order.
            for request in self.waiting.in_turn(self._policy, prefix_len):
                if request.request_id in passed:
                    continue
                stay = self.rows.admit(request)
                if stay is not interface.Refusal.NOT_READY:
                    break
                passed.add(request.request_id)
            else:
                return
            if stay is interface.Refusal.NO_ROOM:
                return
            self._start(request, stay)

    def _start(self, request: Request, stay: Stay) -> None:
        self.live.start(request, stay)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = time.monotonic()
            request.cached_tokens = stay.context_len
            self._total_prompt_tokens += len(request.prompt_ids)
            self._total_cached_tokens += request.cached_tokens

    def _apply_guarded(
        self,
        request: Request,
        result: RowResult,
        commits: list[RequestCommit],
    ) -> None:
        """Ends a request if its own processing fails (its stop strings, say), and no other."""
        try:
            self._apply(request, result, commits)
        except Exception as error:  # A fault in one request must never affect another.
            logger.exception("request %s ends by a fault of its own", request.request_id)
            # The client learns the kind of the fault; its text, which may hold anything, is logged.
            commits.append(self._give_up(request, f"{type(error).__name__} inside the engine"))

    def _apply(
        self,
        request: Request,
        result: RowResult,
        commits: list[RequestCommit],
    ) -> None:
        """Stores what a launch gave one row, as one commit; a finished request leaves at once."""
        progress = self.rows.apply(request, result)
        if progress.finish is not None:
            self.live.end(request, keep=True)
        if progress:
            commits.append(RequestCommit.of(request, progress))
        if progress.finish is not None:
            return
        if result.is_invalid:
            commits.append(self._give_up(request, "the model's outputs are not numbers (NaN)"))
            return
        self.rows.settle(request, result)

    def _give_up(self, request: Request, message: str) -> RequestCommit:
        """Ends a request that cannot go on; none of its pages enters the prefix cache."""
        if request.state is RequestState.RUNNING:
            self.live.end(request, keep=False)
        reason = FinishReason(kind="abort", finished_len=len(request.output_ids), message=message)
        return RequestCommit.of(request, Progress(finish=reason))
