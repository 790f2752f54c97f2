"""HTTP to one server, from the standard library: JSON calls and event streams.

Each call has its own connection and there is no shared state, so many threads may use one
client. The time of an event is taken when its bytes arrive, before they are parsed.
"""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from jdllm import errors
from jdllm.client import failures, sse

READ_BYTES = 1 << 16
MAX_ERROR_CHARS = 500


class Client:
    """Calls one server; `timeout_s` bounds each silence of it, not the whole answer; 0 is no bound.

    With `uses_proxies` the proxies of the environment are used for servers on other machines.
    Benchmarks leave it off, because they measure the direct way to the server.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        uses_proxies: bool = False,
    ):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise errors.ConfigError(f"{base_url=} must look like http://127.0.0.1:30000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout_s = timeout_s or None
        is_here = parts.hostname in ("localhost", "127.0.0.1", "::1")
        goes_direct = is_here or not uses_proxies
        handlers = [urllib.request.ProxyHandler({})] if goes_direct else []
        self._opener = urllib.request.build_opener(*handlers)

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

        An answer that is not a stream counts as one event. A stream that ends before `[DONE]` is
        an error.
        """
        with self._open("POST", route, body) as response:
            if not response.headers.get_content_type().startswith("text/event-stream"):
                content = response.read()
                yield time.perf_counter(), _parsed(content, route)
                return
            for at_s, content in sse.payloads(_chunks(response)):
                if content == sse.DONE:
                    return
                yield at_s, _parsed(content, route)
            raise failures.NoConnection(f"{route}: the stream ended without [DONE]")

    @contextlib.contextmanager
    def _open(
        self, method: str, route: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        request = urllib.request.Request(
            self.base_url + route,
            data=None if body is None else orjson.dumps(body),
            headers=self._headers,
            method=method,
        )
        try:
            try:
                response = self._opener.open(request, timeout=self._timeout_s)
            except urllib.error.HTTPError as error:
                raise _refusal(error, route) from error
            with response:
                yield response
        except urllib.error.URLError as error:  # its `reason` is the actual error
            raise failures.NoConnection(f"{route} of {self.base_url}: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            message = f"{route} of {self.base_url}: {error or repr(error)}"
            raise failures.NoConnection(message) from error


def _refusal(error: urllib.error.HTTPError, route: str) -> failures.Refused:
    with error:
        text = error.read().decode(errors="replace")[:MAX_ERROR_CHARS]
    return failures.Refused(
        f"{route} answers {error.code}: {text}",
        status=error.code,
        retry_after_s=_seconds(error.headers.get("Retry-After")),
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[tuple[float, bytes]]:
    while chunk := response.read1(READ_BYTES):
        yield time.perf_counter(), chunk


def _parsed(content: bytes, route: str) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise failures.BadAnswer(f"{route} sent what is not JSON: {content[:100]!r}") from error


def _seconds(text: str | None) -> float | None:
    """Returns the seconds of a `Retry-After`; None for its other form, a date."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
