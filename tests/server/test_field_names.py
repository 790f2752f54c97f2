"""Refusals of the engine name the field that the client sent."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support import edge, fake_engine

from jdllm import errors
from jdllm.server import app

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GEN = "/generate"
LONG = "x" * (fake_engine.CONTEXT + 1)


def talk(content="hi", **fields):
    return {"messages": [{"role": "user", "content": content}]} | fields


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, talk(LONG), "messages"),
        (CHAT, talk(LONG, max_tokens=5), "messages"),
        (CHAT, talk(max_tokens=600), "max_tokens"),
        (CHAT, talk(max_completion_tokens=600), "max_completion_tokens"),
        (TEXT, {"prompt": LONG}, "prompt"),
        (TEXT, {"prompt": [[1], [1] * 600]}, "prompt"),
        (TEXT, {"prompt": "hi", "max_tokens": 600}, "max_tokens"),
        (GEN, {"text": LONG}, "text"),
        (GEN, {"input_ids": [1] * 600}, "input_ids"),
        (GEN, {"text": "hi", "sampling_params": {"max_new_tokens": 600}}, "max_new_tokens"),
        (GEN, {"text": "hi", "sampling_params": {"max_tokens": 600}}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_too_long(path, body, param, stream):
    response = edge.call(edge.make_state(), path, body | {"stream": stream})
    assert response.status_code == 400
    error = edge.error_of(response)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    if param.startswith("max"):
        assert error["message"].endswith(f"lower {param}")


@pytest.mark.parametrize("param", ["rid", "n", "dllm.algorithm"])
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, talk()), (TEXT, {"prompt": "hi"}), (GEN, {"text": "hi"})]
)
def test_other_names_and_codes_pass_through(path, body, param):
    refusal = errors.RequestError("no", param=param, code="why")
    server = edge.make_state(fake_engine.FakeEngine(refusal=refusal))
    error = edge.error_of(edge.call(server, path, body))
    assert (error["message"], error["param"], error["code"]) == ("no", param, "why")


def test_the_status_of_a_renamed_refusal_stays():
    refusal = errors.QueueFull("full", param="prompt")
    response = edge.call(edge.make_state(fake_engine.FakeEngine(refusal=refusal)), CHAT, talk())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert edge.error_of(response)["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, talk()), (TEXT, {"prompt": "hi"}), (GEN, {"text": "hi"})]
)
def test_a_duplicate_rid_is_400_and_named(path, body):
    server = edge.make_state(fake_engine.FakeEngine(block_s=0.01))
    if path != GEN:
        body = body | {"max_tokens": 8}

    async def both() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app.create_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = [client.post(path, json=body | {"rid": "same"}) for _ in range(2)]
            return await asyncio.gather(*sent)

    first, second = sorted(asyncio.run(both()), key=lambda response: response.status_code)
    assert (first.status_code, second.status_code) == (200, 400)
    assert edge.error_of(second)["param"] == "rid"
