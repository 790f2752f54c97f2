"""One round of the engine: schedule, launch, process. This module knows no threads and no text.

With overlap the host works while the device does: a round plans and starts its launch before it
reads the results of the launch before. It waits for those results first if that launch should
end all its rows.

`EngineCore` is used by one thread at a time (`engine/loop.py`). When a launch fails, only its
own requests end: the pool is rebuilt, and every other running request loses its K,V and begins
again with the tokens it already has. Where launches can be made smaller, a launch that found too
little memory ends no request. A launch that did not begin, because its program could not be
compiled, has changed no memory, and the other requests go on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from jdllm import errors
from jdllm.engine import device_clock, pacing
from jdllm.engine.stats import Counters, Throughput
from jdllm.scheduler.batch import Launch, LaunchResult, NotCompiled, Pause, Runner, ScheduleBatch
from jdllm.scheduler.commits import RequestCommit
from jdllm.scheduler.request import Request
from jdllm.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's status code in the text of JAX's errors

InFlight = tuple[ScheduleBatch, Launch]


@dataclasses.dataclass(frozen=True, slots=True)
class _LogPoint:
    """Totals at the time of the last statistics line."""

    at_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    launches: int = 0
    products: int = 0
    idle_s: float = 0.0


class EngineCore:
    """Drives a scheduler and a runner; in tests both may be fakes that compute their results.

    `max_total_tokens` is None for models that write no tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        max_total_tokens: int | None,
        overlaps: bool = False,
        decode_log_interval: int = 40,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.counters = Counters()
        self.throughput = Throughput()
        self.clock = device_clock.DeviceClock()
        self.requests: dict[str, Request] = {}
        self.pause_s = 0.0
        self._max_total_tokens = max_total_tokens
        self._overlaps = overlaps
        self._in_flight: InFlight | None = None
        self._pacing = pacing.Pacing()
        self._decode_log_interval = decode_log_interval
        self._logged = _LogPoint(time.monotonic())

    def add(self, requests: Sequence[Request], *, is_bounded: bool = True) -> None:
        """Queues all requests, or queues none and raises the RequestError of the refused one.

        `is_bounded` says whether the queue limit applies.
        """
        if not self.has_work:  # the last request may have ended without a step after it
            self.clock.pause()
        if is_bounded:
            self.scheduler.check_room(len(requests))
        added: list[str] = []
        try:
            for request in requests:
                self.scheduler.add_request(request, is_bounded=is_bounded)
                added.append(request.request_id)
        except errors.RequestError:
            for request_id in added:
                self.scheduler.abort(request_id)
            raise
        for request in requests:
            self.requests[request.request_id] = request
            self.counters.requests += 1
            self.counters.prompt_tokens += len(request.prompt_ids) + len(request.suffix_ids)

    def abort(self, request_id: str) -> Request | None:
        """Removes a request in any phase, frees its pages and returns it; None when unknown."""
        request = self.requests.pop(request_id, None)
        if request is not None and self.scheduler.abort(request_id):
            self.counters.aborted_requests += 1
            self._count_end(request)
        return request

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work()

    def step(self) -> list[RequestCommit]:
        """Starts the next launch, and returns what the launch before it committed.

        If the launch before was expected to end all its rows and has ended, no launch is started.
        Without overlap, this method waits for the launch that it has just started. When a launch
        fails, its requests are removed, all others are made ready to run again (or go on, if it
        did not begin), and `LaunchFailed` is raised. If memory did not suffice and smaller launches
        are possible, all requests, those of the launch included, are made ready to run again.

        `pause_s` says how long the caller should wait for a call before the next step.
        """
        previous, self._in_flight = self._in_flight, None
        self.pause_s = 0.0
        self.clock.sample(_is_running(previous))
        batch = None if self._lets_end(previous) else self.scheduler.schedule()
        self.clock.sample(_is_running(previous))
        started = None
        if isinstance(batch, Pause):
            if previous is None:  # otherwise the wait for its results is the pause
                assert math.isfinite(batch.seconds), f"no launch for {self.scheduler.stats()}"
                self.pause_s = batch.seconds
        elif batch is not None:
            try:
                started = (batch, self.runner.launch(batch))
                if previous is None:
                    self._pacing.start()
                self.clock.sample(is_busy=True)
            except Exception as error:  # a fault of one launch must not end the engine
                commits = self._finish(previous)
                raise self._recover(batch, error, commits) from error
        if not self._overlaps:
            previous, started = started, None
        commits = self._finish(previous, behind=started)
        # Only now: if the launch before had failed, this one would be lost with it.
        self._in_flight = started
        self.clock.sample(_is_running(started))
        if not self.has_work:
            self.clock.pause()
        return commits

    def _lets_end(self, in_flight: InFlight | None) -> bool:
        """Waits for a launch if it should end all its rows early; returns whether it has ended."""
        if in_flight is None:
            return False
        batch, launch = in_flight
        return self._pacing.waits_for_end(batch, launch, self.scheduler.steps_left(batch))

    def settle(self) -> list[RequestCommit]:
        """Waits for the launch in flight, if any, and returns what it committed."""
        previous, self._in_flight = self._in_flight, None
        return self._finish(previous)

    def _finish(
        self, in_flight: InFlight | None, behind: InFlight | None = None
    ) -> list[RequestCommit]:
        """Waits for a launch, if there is one, and applies its results.

        `behind` is the launch that the device runs after it.
        """
        if in_flight is None:
            return []
        batch, launch = in_flight
        try:
            result = launch.result()
        except Exception as error:
            raise self._recover(batch, error, []) from error
        self._pacing.finish(result)
        self.clock.sample(_is_running(behind))
        commits = self.scheduler.process_results(batch, result)
        self._count(batch, result, commits)
        return commits

    def _recover(
        self,
        batch: ScheduleBatch,
        error: Exception,
        commits: list[RequestCommit],
    ) -> LaunchFailed:
        failed = {}
        if not (OUT_OF_MEMORY in str(error) and self.scheduler.halve(batch)):
            failed = {row.request.request_id: row.request for row in batch.rows if row.is_current}
        for request_id in failed:
            self.abort(request_id)
        if not isinstance(error, NotCompiled):
            self.scheduler.drop_kv()
            self.runner.reset()
        message = f"{type(error).__name__}: {error}"
        return LaunchFailed(message, list(failed.values()), commits)

    def _count(
        self,
        batch: ScheduleBatch,
        result: LaunchResult,
        commits: list[RequestCommit],
    ) -> None:
        counters = self.counters
        counters.count_launch(batch, result)
        tokens = sum(len(commit.new_token_ids) for commit in commits)
        counters.generation_tokens += tokens
        if tokens:
            self.throughput.add(tokens)
        for commit in commits:
            counters.products += commit.product is not None
            if commit.finish is not None:
                self.requests.pop(commit.request.request_id, None)
                counters.aborted_requests += commit.finish.kind == "abort"
                self._count_end(commit.request)
        if batch.bucket.denoises and counters.decode_launches % self._decode_log_interval == 0:
            self._log()

    def _count_end(self, request: Request) -> None:
        self.counters.edited_tokens += request.num_edited
        self.counters.discarded_tokens += request.num_discarded

    def _log(self) -> None:
        counters, stats, last = self.counters, self.scheduler.stats(), self._logged
        now = self._logged = _LogPoint(
            time.monotonic(),
            counters.generation_tokens,
            counters.denoising_steps,
            counters.decode_launches,
            counters.products,
            self.clock.idle_s,
        )
        tokens, steps = now.tokens - last.tokens, now.steps - last.steps
        passed_s = max(now.at_s - last.at_s, 1e-9)
        idle = 100 * (now.idle_s - last.idle_s) / passed_s
        if self._max_total_tokens is None:
            logger.info(
                "Denoise batch. #running-req: %d, denoise steps: %d, rows per step: %.2f, "
                "steps/s: %.1f, images: %d, device idle: %.1f %%, #queue-req: %d",
                stats.num_running,
                steps,
                steps / max(now.launches - last.launches, 1),
                steps / passed_s,
                now.products - last.products,
                idle,
                stats.num_queued,
            )
            return
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, denoise steps: %d, "
            "tpf: %.2f, gen throughput (token/s): %.1f, device idle: %.1f %%, #queue-req: %d",
            stats.num_running,
            round(stats.token_usage * self._max_total_tokens),
            stats.token_usage,
            steps,
            tokens / steps if steps else 0.0,
            tokens / passed_s,
            idle,
            stats.num_queued,
        )


def _is_running(in_flight: InFlight | None) -> bool:
    return in_flight is not None and not in_flight[1].is_ready()


class LaunchFailed(RuntimeError):
    """Carries the requests that end with a failed launch, and what other launches committed."""

    def __init__(
        self,
        message: str,
        requests: list[Request],
        commits: list[RequestCommit],
    ):
        super().__init__(message)
        self.requests = requests
        self.commits = commits
