"""The lines that a start prints: kernels in short, addresses that work, a request that works."""

from __future__ import annotations

import json
import shlex

import pytest
from support import edge, fake_engine, fake_images

from jdllm.options import config
from jdllm.server.operations import summary

ENGINES = {
    "chat": fake_engine.FakeEngine,
    "ids": fake_engine.FakeEngine,
    "image": fake_images.FakeImageEngine,
}


def test_kernels_are_grouped_by_implementation():
    assert summary.kernels({"a": "xla (no GPU)", "b": "xla"}) == "xla"
    lines = {
        "attention": "hopper",
        "norm": "xla (hidden size 3 is odd)",
        "matmul": "hopper in 3 of 5 launches, xla in 2 of 5 launches (few rows)",
    }
    assert summary.kernels(lines) == "hopper for attention, matmul; xla for norm"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("::1", "http://[::1]:5"),
        ("10.1.2.3", "http://10.1.2.3:5"),
    ],
)
def test_the_address_is_one_that_a_client_can_call(host, url):
    assert summary.url(host, 5) == url


@pytest.mark.parametrize("route", summary.EXAMPLES)
@pytest.mark.parametrize("key", [None, "secret"])
def test_the_request_to_try_is_a_request_that_the_server_takes(route, key):
    options = config.ServerConfig(api_key=key)
    command = summary.example("http://h:1", options, route)
    assert "\n" not in command and "secret" not in command
    words = shlex.split(command.replace("$API_KEY", key or ""))
    headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
    (url,) = [word for word in words if word.startswith("http")]
    reply = edge.call(
        edge.make_state(ENGINES[route](), api_key=key),
        url.removeprefix("http://h:1"),
        json.loads(words[words.index("-d") + 1]),
        headers=headers,
    )
    assert reply.status_code == 200, reply.text
