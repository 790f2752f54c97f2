"""The app behind real sockets, in a thread of this process: what only the wire shows."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

from jdllm.server import lifecycle, state


@contextlib.contextmanager
def serving(server: state.ServerState) -> Iterator[int]:
    """Serves `server` as `jdllm.serve` does; yields the port."""
    listener = lifecycle.bind("127.0.0.1", 0)
    http = lifecycle.http_server(server)
    run = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    run.start()
    try:
        yield listener.getsockname()[1]
    finally:
        http.should_exit = True
        run.join()


def connect(port: int) -> socket.socket:
    """Returns a connection whose reads fail after a minute."""
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Returns what comes until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
