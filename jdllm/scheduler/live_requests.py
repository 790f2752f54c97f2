"""All live requests: which of them wait, which run, and in which slots of the device.

The scheduler and its rows (`scheduler/rows/`) share one `LiveRequests`. Only this file changes
the state of a request, and only a running request has a stay.
"""

from __future__ import annotations

import bisect
from typing import Protocol

from jdllm.scheduler import request as request_lib
from jdllm.scheduler.pages import RequestPages
from jdllm.scheduler.request import Request
from jdllm.scheduler.stay import Stay
from jdllm.scheduler.waiting import WaitingQueue

RequestState = request_lib.RequestState


class Cache(Protocol):
    """What a kind of rows keeps on the device beside slots and pages."""

    def release(self, stay: Stay) -> None:
        """Takes back what a request held that leaves its row."""
        ...

    def flush(self) -> None:
        """Forgets whatever no running request holds."""
        ...


class LiveRequests:
    """The `waiting` requests, the `running` ones by rank, and the free slots."""

    def __init__(self, *, max_running: int, pages: RequestPages, cache: Cache | None = None):
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.pages = pages
        self._cache = cache
        self.max_running = max_running
        self.free_slots = list(reversed(range(max_running)))
        self.total_preemptions = 0
        self._num_arrivals = 0
        self._num_admitted = 0

    @property
    def num_free_rows(self) -> int:
        return self.max_running - len(self.running)

    def max_finished(self, num_rows: int) -> int | None:
        """Returns how many rows of a launch may finish before it ends; None if no request waits."""
        # Not 0 for large launches: where rows finish often, each launch would have only one step.
        return num_rows // 8 if self.waiting else None

    def add(self, request: Request) -> None:
        """Puts a new request into the queue."""
        request.arrival = self._num_arrivals
        request.state = RequestState.WAITING
        self._num_arrivals += 1
        self.by_id[request.request_id] = request
        self.waiting.add(request)

    @property
    def next_slot(self) -> int:
        """The slot on the device that the next request to start gets."""
        return self.free_slots[-1]

    def start(self, request: Request, stay: Stay) -> None:
        """Lets a waiting request run with the stay that admission gave it, in `next_slot`."""
        slot = self.free_slots.pop()
        assert stay.slot == slot, "a stay must have the next slot"
        self.waiting.remove(request, is_turn=True)
        if request.admission is None:
            request.admission = self._num_admitted
            self._num_admitted += 1
        bisect.insort(self.running, request, key=Request.rank)
        request.state = RequestState.RUNNING
        request.stay = stay

    def preempt(self, request: Request, *, keep: bool) -> None:
        """Moves a running request back to the queue; it keeps only its committed tokens."""
        self._leave(request, keep=keep)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.total_preemptions += 1
        self.waiting.add(request)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Gives a running request pages for `num_tokens` tokens; preempts the youngest if need be.

        Returns False if that preempts the request itself.
        """
        while not self.pages.grow(request.held, num_tokens):
            victim = self.running[-1]
            self.preempt(victim, keep=True)
            if victim is request:
                return False
        return True

    def end(self, request: Request, *, keep: bool) -> None:
        """Removes a live request in any state; `keep` offers its full pages to the prefix cache."""
        if request.state is RequestState.RUNNING:
            self._leave(request, keep=keep)
        else:
            self.waiting.remove(request)
        del self.by_id[request.request_id]
        request.state = RequestState.FINISHED

    def flush(self) -> None:
        """Forgets everything on the device that no running request holds."""
        self.pages.flush()
        if self._cache is not None:
            self._cache.flush()

    def _leave(self, request: Request, *, keep: bool) -> None:
        """Takes the stay from a running request, with its slot, pages and block in flight."""
        stay, request.stay = request.held, None
        self.running.remove(request)
        self.pages.release(request, stay, keep=keep)
        if self._cache is not None:
            self._cache.release(stay)
        self.free_slots.append(stay.slot)
