"""Generations as iterators, for threads and for asyncio; leaving one ends its requests.

Clean-up aborts by identity, not by id: an id may be in use again by a later request.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Generic, TypeVar

from jdllm import errors
from jdllm.engine import generations, requests
from jdllm.engine import loop as loop_lib

Item = TypeVar("Item")
Choices = Mapping[str, requests.Choice]


class _Consumer:
    """The choices of one submission that have not ended yet."""

    def __init__(self, loop: loop_lib.EngineLoop, choices: Choices):
        self._loop = loop
        self.unfinished = dict(choices)

    def update(self, request_id: str, event: loop_lib.Event) -> generations.Generation:
        """Returns the choice's generation; a fault raises EngineFault."""
        choice = self.unfinished[request_id]
        generation = choice.update(event)
        if generation.finish_reason is not None:
            del self.unfinished[request_id]
        return generation

    def leave(self) -> None:
        """Aborts what has not ended; does not wait for it."""
        mine = {name: choice.request for name, choice in self.unfinished.items()}
        self.unfinished = {}
        if mine:
            with contextlib.suppress(errors.EngineStopped):
                self._loop.abort(lambda request: mine.get(request.request_id) is request)


class GenerationStream(Iterator[Item], Generic[Item]):
    """Submits at once; yields `transform(generation)` as blocks commit, to one thread.

    `close`, an exception or being dropped, also before the first item, aborts the rest.
    """

    def __init__(
        self,
        loop: loop_lib.EngineLoop,
        choices: Choices,
        transform: Callable[[generations.Generation], Item],
    ):
        self._events: queue.SimpleQueue[tuple[str, loop_lib.Event]] = queue.SimpleQueue()
        self._transform = transform
        self._consumer = _Consumer(loop, {})
        put = self._events.put
        submitted = loop.submit(
            [choice.request for choice in choices.values()],
            lambda request_id, event: put((request_id, event)),
            is_bounded=False,
        )
        submitted.result()
        self._consumer.unfinished = dict(choices)

    def __next__(self) -> Item:
        if not self._consumer.unfinished:
            raise StopIteration
        try:
            return self._transform(self._consumer.update(*self._events.get()))
        except BaseException:  # Ctrl-C too: nothing may run on unseen
            self.close()
            raise

    def close(self) -> None:
        """Aborts what is left; the iterator ends."""
        self._consumer.leave()

    def __del__(self) -> None:
        self.close()


async def as_they_come(
    loop: loop_lib.EngineLoop, choices: Choices, *, is_bounded: bool
) -> AsyncIterator[generations.Generation]:
    """Yields generations as blocks commit, on the caller's asyncio loop.

    Refusals raise at the first step; closing the iterator aborts the rest.
    """
    events: asyncio.Queue[tuple[str, loop_lib.Event]] = asyncio.Queue()
    event_loop = asyncio.get_running_loop()

    def sink(request_id: str, event: loop_lib.Event) -> None:
        event_loop.call_soon_threadsafe(events.put_nowait, (request_id, event))

    consumer = _Consumer(loop, choices)
    submitted = loop.submit(
        [choice.request for choice in choices.values()], sink, is_bounded=is_bounded
    )
    try:
        await asyncio.wrap_future(submitted)
        while consumer.unfinished:
            yield consumer.update(*await events.get())
    finally:
        consumer.leave()
