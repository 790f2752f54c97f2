"""Runs the prompts of one HTTP request on the engine and gives up when the client does.

An HTTP request is one or more jobs (prompts), each with `n` choices. Whatever
ends the consumer (end, error, disconnect, cancellation) closes every engine
iterator, and a closed iterator frees its pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette import requests
from starlette import types as asgi

from jdllm import errors, sampling_params
from jdllm.server import metrics, protocol, state

if TYPE_CHECKING:
    from jdllm.engine import generations

Result = TypeVar("Result")

# Tokenising more characters than this would stall the event loop, so a thread does it.
INLINE_CHARACTERS = 20_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt with its options, and the text that is to follow what is written.

    `field_names` says which field of the body holds what the engine calls `prompt`,
    `max_new_tokens` and so on, where the names differ.
    """

    prompt_ids: list[int]
    params: sampling_params.SamplingParams
    request_id: str
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suffix_ids: Sequence[int] = ()


def new_request_id(prefix: str) -> str:
    """Returns a fresh id; the engine and the answer share it, so it can be aborted by."""
    return f"{prefix}-{uuid.uuid4().hex}"


def job_ids(request_id: str, count: int) -> list[str]:
    """Returns one id per prompt; aborting the common prefix aborts them all."""
    return [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]


async def merged(
    server: state.ServerState, jobs: Sequence[Job]
) -> AsyncIterator[tuple[int, generations.Generation]]:
    """Yields (job position, event) of all jobs in the order of arrival."""
    queue: asyncio.Queue[tuple[int, generations.Generation] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(server, i, job, queue)) for i, job in enumerate(jobs)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await cancel(*tasks)


async def collect(
    server: state.ServerState, jobs: Sequence[Job]
) -> list[tuple[int, generations.Generation]]:
    """Returns the last event of every choice, ordered by job and choice."""
    last: dict[tuple[int, int], generations.Generation] = {}
    async with contextlib.aclosing(merged(server, jobs)) as events:
        async for position, generation in events:
            last[position, generation.index] = generation
    return [(position, last[position, index]) for position, index in sorted(last)]


async def unless_client_leaves(
    request: requests.Request, work: Coroutine[Any, Any, Result]
) -> Result:
    """Awaits `work`, cancelling it when the client disconnects first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise requests.ClientDisconnect
    finally:
        await cancel(task, gone)


async def client_gone(receive: asgi.Receive) -> None:
    """Returns once the client has disconnected; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until their clean-up has run."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns function(*arguments), computed in a thread when `size` characters are many."""
    if size <= INLINE_CHARACTERS:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


async def _pump(
    server: state.ServerState,
    position: int,
    job: Job,
    queue: asyncio.Queue[tuple[int, generations.Generation] | Exception | None],
) -> None:
    arrival_s = time.monotonic()
    trackers: dict[int, metrics.Tracker] = {}
    try:
        stream = server.engine.stream(
            job.prompt_ids, job.params, request_id=job.request_id, suffix=job.suffix_ids
        )
        async with contextlib.aclosing(stream) as events:
            async for generation in events:
                finish = generation.finish_reason
                if finish and finish["type"] == "abort" and server.phase == "draining":
                    raise errors.EngineStopped("the server shut down before this request ended")
                tracker = trackers.setdefault(
                    generation.index, metrics.Tracker(server.metrics, arrival_s)
                )
                tracker.see(generation)
                queue.put_nowait((position, generation))
        queue.put_nowait(None)
    except errors.RequestError as error:
        queue.put_nowait(protocol.renamed(error, job.field_names))
    except Exception as error:  # handed to the consumer, which answers it
        queue.put_nowait(error)
