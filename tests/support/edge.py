"""Helpers of the edge tests: an app around the fake engine, requests without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import fastapi
import httpx
from support import fake_engine

from jdllm.engine.start import startup
from jdllm.options import config
from jdllm.server import app, state


def make_state(
    engine: fake_engine.FakeEngine | None = None, *, ready: bool = True, **options: Any
) -> state.ServerState:
    server = state.ServerState(
        server_config=config.ServerConfig(**options), progress=startup.StartupProgress()
    )
    if ready:
        server.loaded_engine = engine or fake_engine.FakeEngine()
        server.phase = "ready"
    return server


def call(
    server: state.ServerState,
    path: str,
    content: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
) -> httpx.Response:
    """Sends one request; a JSON body makes it a POST."""
    return send(app.create_app(server), path, content, method=method, headers=headers, raw=raw)


def send(
    application: fastapi.FastAPI,
    path: str,
    content: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
) -> httpx.Response:
    """The same for an app that was made before: making one takes longer than most requests."""

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            verb = method or ("GET" if content is None and raw is None else "POST")
            if raw is not None:
                return await client.request(verb, path, content=raw, headers=headers)
            return await client.request(verb, path, json=content, headers=headers)

    return asyncio.run(sent())


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error object, having checked its shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def frames(response: httpx.Response) -> list[Any]:
    """Returns the parsed `data:` frames of a stream that ended with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [part for part in response.text.split("\n\n") if part]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
