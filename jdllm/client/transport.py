"""HTTP to the server under test, from the standard library: JSON calls and event streams.

One connection per call, one thread per call, as the load is many independent clients. The
time of an event is taken when its bytes arrive, before anything is parsed. Proxies of the
environment are not used: what is measured is the way to the server.
"""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from jdllm import errors

READ_BYTES = 1 << 16
MAX_ERROR_CHARS = 500


class HttpError(RuntimeError):
    """Says that a call failed: no connection (`status` None), or an answer other than 200."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Client:
    """Calls one server; `timeout_s` is the longest silence, not of an answer; 0 is none."""

    def __init__(self, base_url: str, *, headers: Mapping[str, str], timeout_s: float):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise errors.ConfigError(f"{base_url=} must look like http://127.0.0.1:30000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._prefix = urllib.parse.urlsplit(self.base_url).path
        self._place = (parts.hostname, parts.port)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        self._kind = kinds[parts.scheme]
        self._headers = {"Content-Type": "application/json", **headers}
        self._timeout_s = timeout_s or None

    def json(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the parsed answer."""
        with self._open(method, route, body) as response:
            return _parsed(response.read(), route)

    def text(self, method: str, route: str) -> str:
        """Returns the answer as text."""
        with self._open(method, route, None) as response:
            return response.read().decode(errors="replace")

    def events(self, route: str, body: Mapping[str, Any]) -> Iterator[tuple[float, Any]]:
        """Yields (arrival in `time.perf_counter` seconds, parsed JSON) of an event stream.

        An answer that is no stream is one event. Ends at the stream's end; a stream that
        breaks off before `[DONE]` is an error.
        """
        with self._open("POST", route, body) as response:
            if not response.headers.get_content_type().startswith("text/event-stream"):
                content = response.read()
                yield time.perf_counter(), _parsed(content, route)
                return
            rest = b""
            while chunk := response.read1(READ_BYTES):
                at_s = time.perf_counter()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    content = line[5:].strip()
                    if content == b"[DONE]":
                        return
                    yield at_s, _parsed(content, route)
            raise HttpError(f"{route}: the stream ended without [DONE]")

    @contextlib.contextmanager
    def _open(
        self, method: str, route: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._kind(*self._place, timeout=self._timeout_s)
        try:
            content = None if body is None else orjson.dumps(body)
            connection.request(method, self._prefix + route, body=content, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")[:MAX_ERROR_CHARS]
                raise HttpError(f"{route} answers {response.status}: {text}", response.status)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise HttpError(f"{route} of {self.base_url}: {error or repr(error)}") from error
        finally:
            connection.close()


def _parsed(content: bytes, route: str) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise HttpError(f"{route} sent what is not JSON: {content[:100]!r}") from error
