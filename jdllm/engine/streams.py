"""What requests give, as iterators, for threads and for asyncio; closing one aborts its requests.

Both iterators submit all requests of a call together: the engine takes all or none. What a request
gives (text, images) is the business of its `Choice`.
The clean-up compares requests by identity, not by id: a later request may use the same id.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import queue
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from jdllm import errors
from jdllm.engine.loop import EngineLoop, Event
from jdllm.host import offload
from jdllm.scheduler.request import Request

Item = TypeVar("Item")
Given = TypeVar("Given")
Given_co = TypeVar("Given_co", covariant=True)
EVENTS_PER_TURN = 32
NamedEvent = tuple[str, Event]  # (id of the request, its event)


class Choice(Protocol[Given_co]):
    """One request on the caller's side."""

    @property
    def request(self) -> Request: ...

    @property
    def has_ended(self) -> bool:
        """Whether `update` has seen the last event."""
        ...

    def update(self, event: Event, /) -> Given_co:
        """Returns what an event of the engine gives the caller; may raise for a fault."""
        ...


class _Submission(Generic[Given]):
    """Choices that run together; `unfinished` are those that have not ended yet."""

    def __init__(self, loop: EngineLoop, choices: Mapping[str, Choice[Given]]):
        self._loop = loop
        self.unfinished = dict(choices)

    def submit(
        self, put: Callable[[NamedEvent], object], *, is_bounded: bool
    ) -> concurrent.futures.Future[None]:
        """Queues all choices or none; the engine thread calls `put` with their events."""
        return self._loop.submit(
            [choice.request for choice in self.unfinished.values()],
            lambda request_id, event: put((request_id, event)),
            is_bounded=is_bounded,
        )

    def update(self, request_id: str, event: Event) -> Given:
        """Returns what the event gives of its choice."""
        choice = self.unfinished[request_id]
        given = choice.update(event)
        if choice.has_ended:
            del self.unfinished[request_id]
        return given

    def leave(self) -> None:
        """Aborts the choices that have not ended; does not wait for that."""
        mine = [choice.request for choice in self.unfinished.values()]
        self.unfinished = {}
        if mine:
            with contextlib.suppress(errors.EngineStopped):
                self._loop.abort_only(mine)


class ChoiceStream(Iterator[Item], Generic[Given, Item]):
    """Submits at once, and yields `transform(given)` of what choices give, to one thread.

    What has not ended is aborted by `close`, by an exception, and when the garbage collector
    takes the iterator, also before the first item.
    """

    def __init__(
        self,
        loop: EngineLoop,
        choices: Mapping[str, Choice[Given]],
        transform: Callable[[Given], Item],
    ):
        self._events: queue.SimpleQueue[NamedEvent] = queue.SimpleQueue()
        self._transform = transform
        self._submission = _Submission(loop, choices)
        self._submission.submit(self._events.put, is_bounded=False).result()

    def __next__(self) -> Item:
        if not self._submission.unfinished:
            raise StopIteration
        try:
            return self._transform(self._submission.update(*self._events.get()))
        except BaseException:  # Ctrl-C too: no request may continue without a reader
            self.close()
            raise

    def close(self) -> None:
        """Aborts the choices that have not ended; the iterator ends."""
        self._submission.leave()

    def __del__(self) -> None:
        self.close()


async def async_stream(
    loop: EngineLoop,
    build: Callable[[], Mapping[str, Choice[Given]]],
    *,
    size: int,
    is_bounded: bool,
) -> AsyncGenerator[Given, None]:
    """Yields what choices give, as it comes, on the caller's asyncio loop.

    The first step builds the choices, in a thread if their `size` is large (`offload`). If one is
    refused, this step raises; closing the iterator aborts the rest.
    """
    choices = await offload.off_loop(size, build)
    events: asyncio.Queue[NamedEvent] = asyncio.Queue()
    event_loop = asyncio.get_running_loop()

    def put(event: NamedEvent) -> None:
        event_loop.call_soon_threadsafe(events.put_nowait, event)

    submission = _Submission(loop, choices)
    try:
        await asyncio.wrap_future(submission.submit(put, is_bounded=is_bounded))
        for count in itertools.count(1):
            if not submission.unfinished:
                return
            yield submission.update(*await events.get())
            if count % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)  # `get` gives no turn to others while there are events
    finally:
        submission.leave()


async def transformed(
    events: AsyncGenerator[Given, None],
    transform: Callable[[Given], Item],
) -> AsyncGenerator[Item, None]:
    """Yields `transform(given)` for each; closing it closes `events`."""
    async with contextlib.aclosing(events):
        async for given in events:
            yield transform(given)
