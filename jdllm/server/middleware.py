"""Plain ASGI middleware: counting, keys, the start-up and drain gate, the body limit.

None of it is a BaseHTTPMiddleware of Starlette, which runs the app in another task and hides
disconnects from it. The order, outermost first: Count, (CORS), Authenticate, Gate, LimitBody.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Collection, Mapping

from starlette import datastructures
from starlette import types as asgi

from jdllm import config
from jdllm.server import responses, state

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
ADMIN_PATHS = frozenset({"/flush_cache"})
# Routes that answer during start and drain: they report the phase themselves, or show metrics.
UNGATED_PATHS = frozenset({"/health", "/ready", "/metrics"})
# How many bytes of a refused body are read, and for how many seconds, before the answer is sent.
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0


def bearer_matches(headers: Mapping[str, str], *keys: str | None) -> bool:
    """Says whether the request has one of `keys`; the time this takes reveals nothing of them."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip().encode() if scheme.lower() == "bearer" else b""
    # A list, not a generator: every key is compared, without an early exit.
    return any([hmac.compare_digest(given, key.encode()) for key in keys if key is not None])


def may_administer(headers: Mapping[str, str], server_config: config.ServerConfig) -> bool:
    """Says whether the caller may flush and abort everything."""
    key = server_config.admin_api_key
    return key is None or bearer_matches(headers, key)


class Authenticate:
    """Answers 401 without a valid bearer key, and 403 on an admin route without the admin's key."""

    def __init__(self, app: asgi.ASGIApp, *, server_config: config.ServerConfig):
        self._app = app
        self._config = server_config

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        refusal = None
        if scope["type"] == "http":
            exempt = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
            headers = datastructures.Headers(scope=scope)
            refusal = None if exempt else self._refusal(scope["path"], headers)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, path: str, headers: Mapping[str, str]) -> asgi.ASGIApp | None:
        keys = (self._config.api_key, self._config.admin_api_key)
        needs_admin = path in ADMIN_PATHS and self._config.admin_api_key is not None
        if (keys[0] is None and not needs_admin) or bearer_matches(headers, keys[1]):
            return None
        if bearer_matches(headers, keys[0]):
            if not needs_admin:
                return None
            return responses.error_response("this route needs the admin API key", status=403)
        return responses.error_response(
            "missing or wrong API key; send Authorization: Bearer <key>",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


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
    """Answers 413 for a body over the limit, by its declared length or, if chunked, its bytes."""

    def __init__(self, app: asgi.ASGIApp, *, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = datastructures.Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await _discard_body(receive)
            await responses.from_exception(self._too_large())(scope, receive, send)
            return
        seen = 0

        async def counted() -> asgi.Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                if message.get("more_body", False):
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
    """Counts requests and responses by route, and logs one line per request."""

    def __init__(self, app: asgi.ASGIApp, *, server: state.ServerState, paths: Collection[str]):
        self._app = app
        self._metrics = server.metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Unknown paths share one label: a scanner must not grow the registry.
        path, method = scope["path"], scope["method"]
        model_card = path.startswith("/v1/models/")
        endpoint = "/v1/models/{id}" if model_card else path if path in self._paths else "other"
        status, began_s = responses.CLIENT_CLOSED_REQUEST, time.monotonic()

        async def noted(message: asgi.Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.count_request(endpoint, method)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.count_response(endpoint, method, status)
            client = ":".join(str(part) for part in scope["client"] or ("-",))
            took_s = time.monotonic() - began_s
            logger.info('%s "%s %s" %d %.3fs', client, method, path, status, took_s)
