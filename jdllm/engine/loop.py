"""The engine thread: the only thread that uses the scheduler and the device.

Other threads pass it functions (`call`), which run between launches. They receive the events of
each request through its sink. A sink must not block.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jdllm import errors
from jdllm.engine import profiling
from jdllm.engine.core import EngineCore, LaunchFailed
from jdllm.scheduler.commits import FinishReason, Progress, RequestCommit
from jdllm.scheduler.request import Request

logger = logging.getLogger(__name__)

R = TypeVar("R")

IDLE_WAIT_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class TokensEvent:
    """What a request committed in a launch; the last event of a request carries `finish`."""

    commit: RequestCommit
    at_s: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True, slots=True)
class FaultEvent:
    """The launch that ran the request failed; no event follows."""

    message: str


Event = TokensEvent | FaultEvent
Sink = Callable[[Event], object]


class EngineLoop:
    """Runs an `EngineCore` in a thread of its own."""

    def __init__(self, core: EngineCore):
        self.core = core
        self._sinks: dict[str, Sink] = {}
        self._calls: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            collections.deque()
        )
        self._wake = threading.Condition()
        self._is_stopping = False
        self.profiler = profiling.Profiler()
        self.is_admitting = True
        self.beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="jdllm-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], R]) -> concurrent.futures.Future[R]:
        """Runs `function` on the engine thread between launches."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        with self._wake:
            if self._is_stopping:
                raise errors.EngineStopped("the engine has shut down")
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def submit(
        self,
        requests: Sequence[Request],
        sink: Callable[[str, Event], object],
        *,
        is_bounded: bool = True,
    ) -> concurrent.futures.Future[None]:
        """Queues all requests, or none if one is refused.

        `sink(request_id, event)` gets their events. `is_bounded` says whether the queue limit
        applies.
        """
        if not self.is_admitting:
            raise errors.EngineStopped("the engine is draining and takes no new requests")

        def add() -> None:
            self.core.add(requests, is_bounded=is_bounded)
            for request in requests:
                self._sinks[request.request_id] = functools.partial(sink, request.request_id)

        return self.call(add)

    def abort(self, ids: Iterable[str] | None = None) -> concurrent.futures.Future[int]:
        """Aborts the live requests with these ids, or all; their sinks get a final event.

        If there are any, launches in flight end at their next step, if the runner can stop them.
        """
        live = self.core.requests
        if ids is None:
            return self._abort(lambda: list(live.values()))
        names = tuple(ids)
        return self._abort(lambda: [one for name in names if (one := live.get(name)) is not None])

    def abort_only(self, requests: Sequence[Request]) -> concurrent.futures.Future[int]:
        """Aborts these requests, as far as they are live, and no later ones with their ids."""
        live = self.core.requests
        return self._abort(lambda: [one for one in requests if live.get(one.request_id) is one])

    def _abort(self, find: Callable[[], list[Request]]) -> concurrent.futures.Future[int]:
        """Aborts what `find` finds on the engine thread; it is also asked on the caller's."""
        is_known = bool(find())

        def run() -> int:
            found = find()
            for request in found:
                self.core.abort(request.request_id)
                sink = self._sinks.pop(request.request_id, None)
                if sink is None:
                    continue
                reason = FinishReason(kind="abort", finished_len=len(request.output_ids))
                progress = Progress(finish=reason)
                commit = RequestCommit.of(request, progress)
                self._deliver(sink, TokensEvent(commit))
            return len(found)

        aborting = self.call(run)
        # Only after the call is queued: a launch that was planned before must end, so that the
        # call can run.
        if is_known:
            self.core.runner.interrupt()
        return aborting

    def stop(self) -> None:
        """Ends the thread after the launch in flight; requests that still run get a fault."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self.core.runner.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._begin_round():
                self._run_calls()
                if self.core.has_work:
                    self._step()
                    self._rest(self.core.pause_s)
                else:
                    self._rest(IDLE_WAIT_S)
        finally:
            with self._wake:  # from here on no call is queued, so `_run_calls` runs them all
                self._is_stopping = True
            self._run_calls()
            self._settle()
            for sink in self._sinks.values():
                self._deliver(sink, FaultEvent("the engine has shut down"))
            self._sinks.clear()

    def _rest(self, seconds: float) -> None:
        """Waits for a call, up to some time."""
        if not seconds:
            return
        with self._wake:
            if not self._calls and not self._is_stopping:
                self._wake.wait(min(seconds, IDLE_WAIT_S))

    def _begin_round(self) -> bool:
        """Begins a round; returns False when the loop must end."""
        self.beat_s = time.monotonic()
        # Before calls are read: a call that comes after this point ends the launch of this round.
        self.core.runner.begin_round()
        return not self._is_stopping

    def _settle(self) -> None:
        """Delivers what the launch in flight committed; a fault of that launch is only logged."""
        try:
            self._deliver_all(self.core.settle())
        except Exception:
            logger.exception("the last launch failed")

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # the caller waits on the future and gets it there
                future.set_exception(error)

    def _step(self) -> None:
        try:
            commits = self.core.step()
            self.profiler.count_step()
        except LaunchFailed as error:
            logger.exception("a launch failed; %d requests end", len(error.requests))
            self._deliver_all(error.commits)
            for request in error.requests:
                self._deliver(self._sinks.pop(request.request_id, None), FaultEvent(str(error)))
            return
        self._deliver_all(commits)

    def _deliver_all(self, commits: Sequence[RequestCommit]) -> None:
        for commit in commits:
            request = commit.request
            if commit.finish is None:
                sink = self._sinks.get(request.request_id)
            else:
                sink = self._sinks.pop(request.request_id, None)
            if not self._deliver(sink, TokensEvent(commit)):
                self._sinks.pop(request.request_id, None)
                self.core.abort(request.request_id)
                self.core.runner.interrupt()

    def _deliver(self, sink: Sink | None, event: Event) -> bool:
        """Passes an event to a sink; False when the consumer is gone (a closed asyncio loop)."""
        if sink is None:
            return True
        try:
            sink(event)
        except RuntimeError:
            logger.warning("a consumer is gone; its request is aborted")
            return False
        return True
