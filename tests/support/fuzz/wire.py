"""A client that can send any bytes, over a connection that it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import socket
from collections.abc import Mapping

TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def request_bytes(
    method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """Returns a request on the wire; it has a length if it has a body or its method asks for it."""
    lines = [f"{method} {target} HTTP/1.1", "Host: fuzz"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Client:
    """Sends requests on one connection, and on a new one where that has ended."""

    def __init__(self, port: int):
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, raw: bytes, method: str = "POST") -> Reply:
        """Returns the whole answer."""
        with self.opened(raw, method) as response:
            body = response.read()
            return Reply(response.status, headers_of(response), body)

    @contextlib.contextmanager
    def opened(self, raw: bytes, method: str = "POST"):
        """Yields the answer as it begins; what is not read of it is given up."""
        response = self._begin(raw, method)
        try:
            yield response
        finally:
            if not response.isclosed() or response.will_close:
                self.close()
            response.close()

    def _begin(self, raw: bytes, method: str) -> http.client.HTTPResponse:
        """Sends; once more if the server has closed the kept connection in the meantime."""
        is_kept = self._socket is not None
        if self._socket is None:
            self._socket = connect(self._port)
        response = http.client.HTTPResponse(self._socket, method=method)
        try:
            self._socket.sendall(raw)
            response.begin()
        except ConnectionError:
            response.close()
            self.close()
            if not is_kept:
                raise
            return self._begin(raw, method)
        return response

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(port: int) -> socket.socket:
    """Returns a new connection."""
    found = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def replies(connection: socket.socket, count: int, method: str = "GET") -> list[Reply]:
    """Returns up to `count` answers; fewer if the server closes before."""
    found: list[Reply] = []
    stream = connection.makefile("rb")
    while len(found) < count:
        response = http.client.HTTPResponse(_Shared(stream), method=method)  # pyright: ignore[reportArgumentType]
        try:
            response.begin()
        except (http.client.BadStatusLine, ConnectionError):
            break
        found.append(Reply(response.status, headers_of(response), response.read()))
        if response.will_close:
            break
    stream.close()
    return found


class _Shared:
    """Lets several answers be read from one buffer; each would close its own."""

    def __init__(self, stream):
        self._stream = stream

    def makefile(self, mode: str):
        return self

    def close(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def headers_of(response: http.client.HTTPResponse) -> dict[str, str]:
    """Returns the headers of an answer, their names in lower case."""
    return {name.lower(): value for name, value in response.getheaders()}
