"""HTTP connections with a time limit for the head of a request, and a limit of their number.

uvicorn closes a connection that is idle after an answer, but waits without end for the first
request of a connection, and for a head or an unread body that comes byte by byte. A client could
hold any number of connections in that way. The body of a request that is served has its limit in
`middleware.LimitBody`.

One connection too many closes the one that has waited longest without a request, so that a new
client, such as a probe, is served however many idle connections somebody opens.
"""

from __future__ import annotations

import asyncio
import http

import h11
from uvicorn.protocols.http import h11_impl

READ_TIMEOUT_HEADERS = [(b"connection", b"close"), (b"content-length", b"0")]


class TimedProtocol(h11_impl.H11Protocol):
    """uvicorn's protocol for one connection, which closes it if no request arrives in time.

    The public attributes are the same for all connections of a server; `with_limits` sets them.
    `waiting` are the connections without a request, those that have waited longest first.
    """

    read_timeout_s: float
    max_connections: int
    waiting: dict[TimedProtocol, None]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as in uvicorn
        super().connection_made(transport)
        self._start_deadline()
        self.waiting[self] = None
        if len(self.connections) > self.max_connections:
            longest = next(iter(self.waiting))
            del self.waiting[longest]  # closing takes a moment; the next one closes another
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_serving():
            self._stop_deadline()
            self.waiting.pop(self, None)
        elif self._deadline is None:
            # uvicorn has just stopped its own timer, for part of a head or of an unread body.
            self._start_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_serving() and not self.transport.is_closing():
            self.waiting[self] = None

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.read_timeout_s, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_serving() or self.transport.is_closing():
            return
        # An answer to a head that has begun; silence to a client that has sent nothing.
        has_begun = self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE
        if has_begun:
            status = http.HTTPStatus.REQUEST_TIMEOUT
            answer = h11.Response(
                status_code=status, headers=READ_TIMEOUT_HEADERS, reason=status.phrase
            )
            for event in (answer, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def with_limits(read_timeout_s: float, max_connections: int) -> type[TimedProtocol]:
    """Returns the protocol class of a server; uvicorn makes one instance for each connection."""
    attributes = {
        "read_timeout_s": read_timeout_s,
        "max_connections": max_connections,
        "waiting": {},
    }
    return type("TimedProtocol", (TimedProtocol,), attributes)
