"""Plain ASGI middleware: counting, CORS, keys, the start-up and drain gate, the body's limits.

None of it is a BaseHTTPMiddleware of Starlette, which runs the app in another task and hides
disconnects from it. The order, outermost first: Count, `request_forms.PlainForm`, (Cors),
`ollama.PlainErrors`, `responses.CatchFaults`, Authenticate, Gate, LimitBody,
`request_forms.Decompress`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence

from starlette import datastructures
from starlette import types as asgi
from starlette.middleware import cors

from jdllm.server import state
from jdllm.server.edge import log_format, request_context, request_forms, responses
from jdllm.server.playground import page

logger = logging.getLogger(__name__)

PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/livez", "/readyz"})
METRICS_PATH = "/metrics"
ADMIN_PATHS = frozenset({"/flush_cache", "/start_profile", "/stop_profile"})
# Routes that answer during start and drain: they report the phase themselves, or show metrics, or
# are a page that waits for the server.
UNGATED_PATHS = PROBE_PATHS | {METRICS_PATH, "/version"} | page.PATHS
REQUEST_ID_HEADER = b"x-request-id"
MAX_LOGGED_PATH = 512
# How many bytes of a refused body are read, and for how many seconds, before the answer is sent.
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0


def is_from_other_page(headers: Mapping[str, str]) -> bool:
    """Says whether a browser sent the request for a web page of another origin.

    CORS alone does not keep such requests away: a browser sends simple ones (a form, an image)
    without asking, and only hides the answers.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    return headers.get("sec-fetch-site") in ("cross-site", "same-site")


class Authenticate:
    """Answers 401 without a valid bearer key, and 403 on an admin route without the admin's key.

    Also notes who the caller is. Web pages of other origins may not use the admin routes.
    """

    def __init__(self, app: asgi.ASGIApp, *, server: state.ServerState):
        self._app = app
        self._keys = server.keys
        is_open = not server.server_config.metrics_require_api_key
        self._open_paths = PROBE_PATHS | page.PATHS | ({METRICS_PATH} if is_open else set())

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        refusal = None
        if scope["type"] == "http":
            headers = datastructures.Headers(scope=scope)
            caller = self._keys.caller(headers)
            # Always set: on a connection that is kept alive, a task may inherit the last caller.
            request_context.CALLER.set(caller or request_context.ANONYMOUS)
            exempt = scope["path"] in self._open_paths or scope["method"] == "OPTIONS"
            refusal = None if exempt else self._refusal(scope["path"], headers, caller)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(
        self, path: str, headers: Mapping[str, str], caller: request_context.Caller | None
    ) -> asgi.ASGIApp | None:
        if path in ADMIN_PATHS and is_from_other_page(headers):
            return responses.error_response(
                "web pages of other origins may not use this route", status=403
            )
        needs_admin = path in ADMIN_PATHS and bool(self._keys.admin)
        needs_key = needs_admin or bool(self._keys.user) or path == METRICS_PATH
        if not needs_key or (caller is not None and caller.is_admin):
            return None
        if caller is not None:
            if not needs_admin:
                return None
            return responses.error_response("this route needs the admin API key", status=403)
        return responses.error_response(
            "missing or wrong API key; send Authorization: Bearer <key>",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class Cors:
    """Lets web pages of the given origins read and generate; admin routes have no CORS at all.

    Credentials (cookies) are off: the key travels in a header that a page must set itself.
    """

    def __init__(self, app: asgi.ASGIApp, *, origins: Sequence[str]):
        self._app = app
        self._cors = cors.CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER.decode()],
        )

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"] in ADMIN_PATHS
        await (self._app if is_admin else self._cors)(scope, receive, send)


class Gate:
    """Answers 503 with Retry-After while the engine is loading or the server is draining."""

    def __init__(self, app: asgi.ASGIApp, *, server: state.ServerState):
        self._app = app
        self._server = server

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        phase = self._server.phase
        if scope["type"] != "http" or phase == "ready" or scope["path"] in UNGATED_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = responses.error_response(
            f"the server is {phase}",
            status=503,
            code=phase,
            headers={"Retry-After": str(responses.START_RETRY_AFTER_S)},
        )
        await refusal(scope, receive, send)


class LimitBody:
    """Answers 413 for a body over the limit, by its declared length or, if chunked, its bytes.

    A body that does not arrive within `timeout_s` seconds is answered 408.
    """

    def __init__(self, app: asgi.ASGIApp, *, max_bytes: int, timeout_s: float):
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = datastructures.Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await _discard_body(receive)
            await responses.from_exception(self._too_large())(scope, receive, send)
            return
        seen, is_complete = 0, False
        deadline_s: float | None = None

        async def counted() -> asgi.Message:
            nonlocal seen, is_complete, deadline_s
            if is_complete:  # what follows is a disconnect, for which a route may wait for long
                return await receive()
            if deadline_s is None:
                deadline_s = asyncio.get_running_loop().time() + self._timeout_s
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise responses.RequestTimeout(
                    f"the body did not arrive within {self._timeout_s:g} s"
                ) from None
            is_complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                if not is_complete:
                    await _discard_body(receive)
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> responses.BodyTooLarge:
        return responses.BodyTooLarge(f"the body is larger than {self._max_bytes} bytes")


async def _discard_body(receive: asgi.Receive) -> None:
    """Reads the rest of a body, up to a number of bytes and seconds.

    A socket that is closed with unread data is reset, and the client may never see the answer.
    """
    seen, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while more and seen < DISCARD_BYTES:
                message = await receive()
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)  # not in a disconnect


class Count:
    """Names, counts and logs requests: the outermost layer, which sees every answer.

    The `x-request-id` of a request comes back with its answer; a request without one, or with
    one that could not stand in a log line, gets a new one.
    """

    def __init__(self, app: asgi.ASGIApp, *, server: state.ServerState, paths: Collection[str]):
        self._app = app
        self._metrics = server.metrics
        self._metrics.know(paths)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        given = datastructures.Headers(scope=scope).get(REQUEST_ID_HEADER.decode())
        request_id = request_context.request_id_from(given)
        request_context.REQUEST_ID.set(request_id)
        status, began_s = responses.CLIENT_CLOSED_REQUEST, time.monotonic()

        async def noted(message: asgi.Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (REQUEST_ID_HEADER, request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        endpoint = request_forms.canonical(path)
        self._metrics.count_request(endpoint, method)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.count_response(endpoint, method, status)
            client = ":".join(str(part) for part in scope["client"] or ("-",))
            took_s = time.monotonic() - began_s
            # As on the wire: a quote or a space in the path would forge the fields behind it.
            quoted = urllib.parse.quote(path[:MAX_LOGGED_PATH], errors="replace")
            logger.info(
                '%s "%s %s" %d %.3fs %s',
                client,
                log_format.word(method),
                quoted,
                status,
                took_s,
                request_id,
            )
