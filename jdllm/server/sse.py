"""Streams: frames, what fills a silence, and a response that notices a disconnect.

Starlette's own streaming response notices a disconnect only if the server's `send` raises, and
not every server does that; this response watches `receive`. It also waits briefly for the first
event, so that a refused request gets a real HTTP error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette import responses as starlette_responses
from starlette import types as asgi

from jdllm.server import running
from jdllm.server.edge import responses

logger = logging.getLogger(__name__)

DONE_FRAME = b"data: [DONE]\n\n"
# Clients ignore blank lines. By the standard they ignore comments too, but SGLang's load
# generator (0.5.23) parses every line that is not blank as JSON.
PING_FRAME = b"\n\n"
# A refusal comes at once. After this wait the headers are sent, and errors become frames.
FIRST_EVENT_WAIT_S = 1.0
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class _Signal(enum.Enum):
    END = enum.auto()
    CLIENT_GONE = enum.auto()


def frame(content: Any) -> bytes:
    """Returns one `data:` frame."""
    return b"data: " + responses.json_bytes(content) + b"\n\n"


def error_frame(error: Exception) -> bytes:
    """Returns the frame of an error that came after the headers."""
    _, body, _ = responses.describe(error)
    return frame(body)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How a stream is written: its media type, pings, errors, and what stands at its end.

    The default is that of OpenAI's chat and of SGLang. An error ends a stream, too.
    """

    media_type: bytes = b"text/event-stream; charset=utf-8"
    ping: bytes = PING_FRAME
    error: Callable[[Exception], bytes] = error_frame
    end: bytes = DONE_FRAME


class EventStream(starlette_responses.Response):
    """Sends the frames of an async generator, then the end; closes it on disconnect."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        *,
        ping_interval_s: float,
        framing: Framing | None = None,
    ):
        super().__init__()
        self._frames = frames
        self._ping_interval_s = ping_interval_s
        self._framing = framing or Framing()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        queue: asyncio.Queue[bytes | Exception | _Signal] = asyncio.Queue()
        tasks = (
            asyncio.create_task(self._pump(queue)),
            asyncio.create_task(_watch(receive, queue)),
        )
        try:
            first = await self._next(queue, min(FIRST_EVENT_WAIT_S, self._ping_interval_s))
            if isinstance(first, Exception):
                await responses.from_exception(first)(scope, receive, send)
            else:
                headers = [(b"content-type", self._framing.media_type), *HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._forward(first, queue, send)
        finally:
            await running.cancel(*tasks)

    async def _forward(
        self,
        item: bytes | Exception | _Signal,
        queue: asyncio.Queue[bytes | Exception | _Signal],
        send: asgi.Send,
    ) -> None:
        while not isinstance(item, _Signal):
            if isinstance(item, Exception):
                await _send(send, self._framing.error(item))
                break
            await _send(send, item)
            item = await self._next(queue, self._ping_interval_s)
        if item is _Signal.CLIENT_GONE:
            logger.info("client left during a stream; its requests are closed")
        else:
            await _send(send, self._framing.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(
        self, queue: asyncio.Queue[bytes | Exception | _Signal], wait_s: float
    ) -> bytes | Exception | _Signal:
        try:
            return await asyncio.wait_for(queue.get(), wait_s)
        except TimeoutError:
            return self._framing.ping

    async def _pump(self, queue: asyncio.Queue[bytes | Exception | _Signal]) -> None:
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for item in frames:
                    queue.put_nowait(item)
            queue.put_nowait(_Signal.END)
        except Exception as error:  # `__call__` sends it to the client
            queue.put_nowait(error)


async def _send(send: asgi.Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _watch(receive: asgi.Receive, queue: asyncio.Queue[bytes | Exception | _Signal]) -> None:
    await running.client_gone(receive)
    queue.put_nowait(_Signal.CLIENT_GONE)
