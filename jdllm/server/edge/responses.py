"""Bodies of answers: JSON through orjson, errors in OpenAI's nested form.

Every error that a client sees is made here, so that plain answers, middleware and stream frames
agree. About a fault inside the engine, a client learns only that it happened; the stack goes to
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import fastapi
import orjson
from fastapi import exceptions, routing
from starlette import exceptions as starlette_exceptions
from starlette import requests, responses
from starlette import types as asgi

from jdllm import errors
from jdllm.server.edge import request_context

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's number; only logs and metrics show it
START_RETRY_AFTER_S = 5
MAX_SHOWN = 128  # characters of a method or path in an error

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    500: "server_error",
    503: "service_unavailable",
}


class BodyTooLarge(errors.RequestError):
    """Says that the request body is over the limit."""

    status = 413


class UnsupportedEncoding(errors.RequestError):
    """Says that the body is compressed in a way that is not known here."""

    status = 415


class RequestTimeout(errors.RequestError):
    """Says that a request did not arrive in time."""

    status = 408


class GenerationFault(errors.RequestError):
    """Says that an answer ended by a fault that befell only this request."""

    status = 500


class NotFound(errors.RequestError):
    """Says that the named model does not exist here."""

    status = 404


class Forbidden(errors.RequestError):
    """Says that the key is valid, but is not the admin's key."""

    status = 403


def json_bytes(content: Any) -> bytes:
    """Returns `content` as JSON; numpy scalars are written as numbers."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
    """Returns a JSON answer."""
    return responses.Response(
        json_bytes(content), status, dict(headers or {}), media_type="application/json"
    )


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns OpenAI's `{"error": {message, type, param, code}}`."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    *,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> responses.Response:
    """Returns an error answer."""
    body = error_body(message, status=status, param=param, code=code)
    return json_response(body, status=status, headers=headers)


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns the status, body and headers for an error; logs it if it is a fault of the engine."""
    if not isinstance(error, errors.RequestError):
        request_id = request_context.REQUEST_ID.get()
        logger.error("fault while serving request %s", request_id, exc_info=error)
        return 500, error_body("internal server error", status=500, code="internal_error"), {}
    code, headers = error.code, {}
    if isinstance(error, errors.QueueFull | errors.EngineStopped | errors.ReplicaLost):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, errors.RequestTooLong):
        code = code or "context_length_exceeded"
    elif isinstance(error, GenerationFault):
        code = code or "internal_error"
    elif isinstance(error, BodyTooLarge | RequestTimeout):
        headers["Connection"] = "close"
    elif isinstance(error, UnsupportedEncoding):
        headers["Accept-Encoding"] = "gzip, deflate"
    body = error_body(str(error), status=error.status, param=error.param, code=code)
    return error.status, body, headers


def from_exception(error: Exception) -> responses.Response:
    """Returns the answer to a request that failed with `error`."""
    status, body, headers = describe(error)
    return json_response(body, status=status, headers=headers)


def install_handlers(app: fastapi.FastAPI, methods: Mapping[str, Collection[str]]) -> None:
    """Gives all errors the same form, FastAPI's own 404, 405 and 422 included.

    `methods` are the methods of each path: FastAPI's own 405 names those of one route only.
    """

    async def on_request_error(_: requests.Request, error: Exception) -> responses.Response:
        return from_exception(error)

    async def on_http(request: requests.Request, error: Exception) -> responses.Response:
        assert isinstance(error, starlette_exceptions.HTTPException), "registered for it below"
        method, path = request.method[:MAX_SHOWN], request.url.path[:MAX_SHOWN]
        message = f"{method} {path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        headers = dict(error.headers or {})
        route = request.scope.get("route")
        pattern = route.path if isinstance(route, routing.APIRoute) else request.url.path
        if error.status_code == 405 and pattern in methods:
            headers["Allow"] = ", ".join(sorted(methods[pattern]))
        return error_response(message, status=error.status_code, code=code, headers=headers)

    async def on_query(_: requests.Request, error: Exception) -> responses.Response:
        assert isinstance(error, exceptions.RequestValidationError), "registered for it below"
        first = error.errors()[0]
        return error_response(first["msg"], status=400, param=str(first["loc"][-1]))

    async def on_disconnect(_: requests.Request, __: Exception) -> responses.Response:
        return responses.Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(errors.RequestError, on_request_error)
    app.add_exception_handler(starlette_exceptions.HTTPException, on_http)
    app.add_exception_handler(exceptions.RequestValidationError, on_query)
    app.add_exception_handler(requests.ClientDisconnect, on_disconnect)


class CatchFaults:
    """ASGI middleware that logs an unhandled fault and answers a bare 500.

    Starlette's own handler raises again after its answer, which would log each stack twice.
    """

    def __init__(self, app: asgi.ASGIApp):
        self._app = app

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        started = False

        async def watched(message: asgi.Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # the server edge: log, answer 500, keep serving
            if scope["type"] != "http" or started:
                raise
            await from_exception(error)(scope, receive, send)
