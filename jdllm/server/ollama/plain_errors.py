"""Makes the routes under /api/ answer like Ollama where the rest of the server does not.

It stands around the other middleware, so that a missing key, a body that is too large and a
server that is starting are told in Ollama's form, too.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette import datastructures
from starlette import types as asgi

from jdllm.server.edge import responses

PREFIX = "/api/"


class PlainErrors:
    """ASGI middleware: errors become `{"error": "..."}`, and no program has to name JSON.

    Ollama reads a body as JSON whatever its content type says, and its documentation lives of
    `curl -d`. A web page has to say it all the same: its browser then asks the server first
    whether that page may.
    """

    def __init__(self, app: asgi.ASGIApp):
        self._app = app

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        headers = datastructures.MutableHeaders(raw=list(scope["headers"]))
        if "origin" not in headers:
            headers["content-type"] = "application/json"
        error_start: asgi.Message | None = None
        body = b""

        async def rewritten(message: asgi.Message) -> None:
            nonlocal error_start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                error_start = message
            elif error_start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    # An answer to a client that has left has no body.
                    content = responses.json_bytes(plain(orjson.loads(body))) if body else body
                    start_headers = datastructures.MutableHeaders(raw=error_start["headers"])
                    start_headers["content-length"] = str(len(content))
                    await send(error_start)
                    await send({"type": "http.response.body", "body": content})

        await self._app({**scope, "headers": headers.raw}, receive, rewritten)


def plain(content: dict[str, Any]) -> dict[str, str]:
    """Returns Ollama's form of an error of OpenAI's form; the message names the field."""
    error = content["error"]
    message, param = error["message"], error["param"]
    # A name that is no line is quoted by the message itself.
    if param is not None and param.isprintable() and param.rpartition(".")[2] not in message:
        message = f"{param}: {message}"
    return {"error": message}
