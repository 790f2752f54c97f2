"""Runs the images of one HTTP request on the engine, and aborts them when the client leaves.

As with text (`running.py`): the engine takes all images or none, and whatever ends the consumer
closes the engine's iterator, which ends the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING

from jdllm import errors
from jdllm.engine import requests as engine_requests
from jdllm.server import running, state
from jdllm.server.edge import metrics, responses

if TYPE_CHECKING:
    from jdllm.engine.images.requests import ImageEvent, ImageRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The resolved images of one HTTP request.

    `field_names` maps the engine's names of fields to the body's, where the two differ.
    """

    requests: Sequence[ImageRequest]
    rid: str
    priority: int | None = None
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def stream(server: state.ServerState, call: Call) -> AsyncGenerator[ImageEvent, None]:
    """Yields previews and images as they come.

    If one image ends by a fault or an abort, the others are given up, and the error is raised.
    """
    arrival_s = time.monotonic()
    count = len(call.requests)
    try:
        running.check_choices(server, count)
        events = server.images.stream(call.requests, rid=call.rid, priority=call.priority)
        with server.live.hold([call.rid], [count]) as live:
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.kind != "partial":
                        name = engine_requests.choice_id(call.rid, count, event.request_index)
                        live.end(name)
                        metrics.observe_image(server.metrics, event, name, arrival_s)
                    _raise_end(server, event)
                    yield event
    except errors.RequestError as error:
        raise renamed(error, call.field_names) from None


async def collect(server: state.ServerState, call: Call) -> list[ImageEvent]:
    """Returns the last event of every image, in the order of the requests."""
    finals: dict[int, ImageEvent] = {}
    async with contextlib.aclosing(stream(server, call)) as events:
        async for event in events:
            if event.kind == "final":
                finals[event.request_index] = event
    return [finals[index] for index in range(len(call.requests))]


def renamed(error: errors.RequestError, names: Mapping[str, str]) -> errors.RequestError:
    """Returns `error` with the name that its field has in the request's body."""
    if error.param is None or error.param not in names:
        return error
    return type(error)(str(error), param=names[error.param], code=error.code)


def _raise_end(server: state.ServerState, event: ImageEvent) -> None:
    """Raises for an image that ended without a picture: there is no answer without one."""
    if event.kind == "fault":
        raise responses.GenerationFault(f"the request ended by a fault: {event.message}")
    if event.kind == "abort":
        if server.phase == "draining":
            raise errors.EngineStopped("the server shut down before this request ended")
        raise errors.RequestError(
            f"image {event.request_index} was aborted before it was done", code="aborted"
        )
