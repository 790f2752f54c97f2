"""Keep-alive lines, slow starts and vanishing clients, seen at the ASGI interface."""

from __future__ import annotations

import asyncio
import json

from support import edge, fake_engine

from jdllm.server import app, sse

BODY = {"prompt": "hi", "max_tokens": 8, "stream": True}


def test_silence_is_filled_with_pings():
    server = edge.make_state(fake_engine.FakeEngine(block_s=0.3))
    server.ping_interval_s = 0.01
    response = edge.call(server, "/v1/completions", BODY)
    assert response.text.count("\n\n\n\n") >= 2
    lines = response.text.splitlines()
    assert all(line.startswith("data: ") for line in lines if line), "some read every line as JSON"
    texts = [frame["choices"][0]["text"] for frame in edge.frames(response)]
    assert "".join(texts) == fake_engine.expected_text("hi", 8)


def test_an_error_after_the_headers_is_a_frame():
    async def late():
        await asyncio.sleep(0.3)
        raise RuntimeError("secret")
        yield b""

    sent = asyncio.run(_drive(sse.EventStream(late(), ping_interval_s=0.01)))
    assert sent[0]["status"] == 200
    body = b"".join(message.get("body", b"") for message in sent)
    assert body.startswith(b"\n\n")
    assert body.endswith(sse.DONE_FRAME)
    assert b'"server_error"' in body
    assert b"secret" not in body
    assert sent[-1]["more_body"] is False


def test_a_client_that_left_before_the_first_block_frees_its_request():
    for stream in (False, True):
        engine = fake_engine.FakeEngine(block_s=3600.0)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(b"content-type", b"application/json")],
        }
        body = json.dumps(BODY | {"stream": stream, "n": 3}).encode()
        served = app.create_app(edge.make_state(engine))
        asyncio.run(asyncio.wait_for(_leave(served, scope, body, engine), 60.0))
        assert engine.open_requests == set()


async def _leave(served, scope, body, engine) -> None:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        while not engine.open_requests:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    await served(scope, receive, send)


async def _drive(response) -> list[dict]:
    sent: list[dict] = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await response({"type": "http"}, receive, send)
    return sent
