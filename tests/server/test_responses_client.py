"""The openai package, unmodified, against a server process: its newer API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest
from support import fake_engine, waiting

TESTS = pathlib.Path(__file__).resolve().parents[1]
PROMPT = "<user>hi"
TEXT = fake_engine.expected_text(PROMPT, 10)
# The fake engine stops at a token: one that comes after eight letters.
STOP = {"stop_token_ids": [fake_engine.expected_ids(list(PROMPT.encode()), 9)[8]]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    process = subprocess.Popen(
        [sys.executable, "-m", "support.fake_server", str(port), "5", "0.01"],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(address + "/health").status_code == 200
        return False

    try:
        waiting.wait_until(is_ready)
        yield address + "/v1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_create(client):
    answer = client.responses.create(model="any", input="hi", max_output_tokens=10)
    assert answer.output_text == TEXT
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 10)
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_create_with_stream(client):
    events = client.responses.create(model="any", input="hi", max_output_tokens=10, stream=True)
    seen = list(events)
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert len(deltas) == 3
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == TEXT


def test_the_stream_helper(client):
    with client.responses.stream(model="any", input="hi", extra_body=STOP) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert snapshots == [TEXT[:4], TEXT[:8]]
    assert (answer.status, answer.output_text) == ("completed", TEXT[:8])
    assert answer.usage.total_tokens == len(PROMPT) + 8


def test_the_async_client(url):
    async def ask() -> str:
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            client.responses.stream(model="m", input="hi", extra_body=STOP) as stream,
        ):
            return (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == TEXT[:8]


def test_a_conversation_goes_on_with_the_items_of_the_answer(client):
    history = [{"role": "user", "content": "hi"}]
    first = client.responses.create(model="any", input=history, extra_body=STOP)
    history += [item.model_dump() for item in first.output]
    history.append({"role": "user", "content": "more"})
    second = client.responses.create(model="any", input=history, max_output_tokens=4)
    prompt = f"{PROMPT}<assistant>{TEXT[:8]}<user>more"
    assert second.output_text == fake_engine.expected_text(prompt, 4)


def test_refusals_reach_the_client(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="any", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with (
        pytest.raises(openai.BadRequestError) as caught,
        client.responses.stream(model="any", input="hi", max_output_tokens=600),
    ):
        pass
    assert (caught.value.param, caught.value.code) == (
        "max_output_tokens",
        "context_length_exceeded",
    )
