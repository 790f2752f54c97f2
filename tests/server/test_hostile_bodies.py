"""Hostile requests: refused by name, quickly, in little memory, while the event loop goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from support import edge, fake_engine, stalls

from jdllm import value_checks
from jdllm.options import sampling_params
from jdllm.server import app
from jdllm.server.edge import bodies

CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
MEGABYTE = 1 << 20


def nested(depth, leaf="x", *, name=None):
    for _ in range(depth):
        leaf = [leaf] if name is None else {name: leaf}
    return leaf


def message(content: Any = "hi"):
    return {"role": "user", "content": content}


# path, what makes the body (or its bytes), the field that the error names. All bodies together
# would fill 170 MB of every test run.
REFUSED = {
    "4,096 prompts with 128 choices": (TEXT, lambda: {"prompt": ["a"] * 4096, "n": 128}, "prompt"),
    "the same on the native route": (
        GEN,
        lambda: {"text": ["a"] * 4096, "sampling_params": {"n": 128}},
        "text",
    ),
    "many choices in a list of options": (
        GEN,
        lambda: {"text": ["a"] * 4000, "sampling_params": [{"n": 2}] * 4000},
        "text",
    ),
    "a million prompts": (TEXT, lambda: {"prompt": ["a"] * 10**6}, None),
    "as many prompts as strings may be": (TEXT, lambda: {"prompt": ["a"] * 262_000}, "prompt"),
    "a stop string of a megabyte": (TEXT, lambda: {"prompt": "a", "stop": "a" * MEGABYTE}, "stop"),
    "33 stop strings": (TEXT, lambda: {"prompt": "a", "stop": ["a"] * 33}, "stop"),
    "many stop ids": (
        TEXT,
        lambda: {"prompt": "a", "stop_token_ids": [1] * 10**6},
        "stop_token_ids",
    ),
    "many wrong stop ids": (
        TEXT,
        lambda: {"prompt": "a", "stop_token_ids": ["a"] * 200_000},
        "stop_token_ids.0",
    ),
    "many stop ids on the native route": (
        GEN,
        lambda: {"text": "a", "sampling_params": {"stop_token_ids": [1] * 10**6}},
        "stop_token_ids",
    ),
    "1.5 million short texts": ("/tokenize", lambda: {"prompt": ["a"] * 1_500_000}, None),
    "200,000 short texts": ("/tokenize", lambda: {"prompt": ["a"] * 200_000}, "prompt"),
    "a text of 7 MB": ("/tokenize", lambda: {"prompt": "a" * (7 * MEGABYTE)}, "prompt"),
    "40 long prompts": (TEXT, lambda: {"prompt": ["ab " * 60_000] * 40}, "prompt"),
    "a long suffix": (TEXT, lambda: {"prompt": "a", "suffix": "ab " * 2_000_000}, "suffix"),
    "a million ids": (GEN, lambda: {"input_ids": [5] * 10**6}, "input_ids"),
    "200,000 messages": (CHAT, lambda: {"messages": [message("")] * 200_000}, None),
    "9,000 messages": (CHAT, lambda: {"messages": [message("")] * 9000}, "messages"),
    "9,000 messages to count": (
        "/tokenize",
        lambda: {"messages": [message("")] * 9000},
        "messages",
    ),
    "30,000 message parts": (
        CHAT,
        lambda: {"messages": [message([{"type": "text", "text": "a"}] * 30_000)]},
        "messages",
    ),
    "an unknown key of 7 MB": (
        TEXT,
        lambda: {"prompt": "a", "k" * (7 * MEGABYTE): 1},
        "k" * 77 + "...",
    ),
    "an unknown option of 7 MB": (
        GEN,
        lambda: {"text": "a", "sampling_params": {"k" * (7 * MEGABYTE): 1}},
        "k" * 77 + "...",
    ),
    "a role of 7 MB": (
        CHAT,
        lambda: {"messages": [{"role": "r" * (7 * MEGABYTE), "content": ""}]},
        "messages.0.role",
    ),
    "an id of 7 MB": (TEXT, lambda: {"prompt": "a", "rid": "r" * (7 * MEGABYTE), "n": 128}, "rid"),
    "an id of 7 MB on the native route": (
        GEN,
        lambda: {"text": "a", "rid": "r" * (7 * MEGABYTE)},
        "rid",
    ),
    "a nested id": (GEN, lambda: {"text": "a", "rid": nested(60)}, "rid"),
    "30,000 options": (
        GEN,
        lambda: {"text": "a", "sampling_params": [{}] * 30_000},
        "sampling_params",
    ),
    "2.7 million empty lists": (TEXT, lambda: b'{"prompt": [' + b"[]," * 2_700_000 + b"[]]}", None),
    "a million objects": (TEXT, lambda: b'{"prompt": [' + b'{"a":1},' * 10**6 + b"{}]}", None),
    "a million brackets": (TEXT, lambda: b"[" * 10**6, None),
    "a million backslashes": (TEXT, lambda: b'{"prompt": "' + b"\\" * 10**6, None),
    "two million keys": (TEXT, lambda: b"{" + b'"a":1,' * 10**6 + b'"a":1}', None),
    "100,000 keys": (
        TEXT,
        lambda: {"prompt": "a"} | {f"key{i}": False for i in range(100_000)},
        "key100",
    ),
    "an algorithm that is a list": (
        TEXT,
        lambda: {"prompt": "a", "dllm": {"algorithm": ["x"]}},
        None,
    ),
}
REFUSED |= {
    f"a value of {field}, {depth} levels deep": (path, build(nested(depth, name=name)), None)
    for depth in (55, 1000)
    for name in (None, "a")
    for path, field, build in [
        *[
            (TEXT, field, lambda value, field=field: {"prompt": "a", field: value})
            for field in ("dllm", "stop", "n", "echo", "zzz", "logit_bias", "stream_options")
        ],
        (TEXT, "prompt", lambda value: {"prompt": value}),
        (CHAT, "content", lambda value: {"messages": [message(value)]}),
        (GEN, "rid", lambda value: {"text": "a", "rid": value}),
        (GEN, "text", lambda value: {"text": value}),
        *[
            (
                GEN,
                field,
                lambda value, field=field: {"text": "a", "sampling_params": {field: value}},
            )
            for field in ("n", "seed", "stop", "threshold", "min_p", "regex", "dllm")
        ],
        *[
            (
                GEN,
                f"dllm.{field}",
                lambda value, field=field: {
                    "text": "a",
                    "sampling_params": {"dllm": {field: value}},
                },
            )
            for field in ("algorithm", "threshold", "alg", "zzz", "steps")
        ],
    ]
}

# What is large, but within the limits, is served.
SERVED = {
    "100,000 keys without a value": (
        TEXT,
        lambda: {"prompt": "a"} | {f"key{i}": None for i in range(100_000)},
    ),
    "1,000 texts": ("/tokenize", lambda: {"prompt": ["some words " * 600] * 1000}),
    "texts of 6 MB": ("/tokenize", lambda: {"prompt": ["words " * 300_000] * 3}),
    "8,000 messages": ("/tokenize", lambda: {"messages": [message("a")] * 8000}),
    "a million ids": ("/detokenize", lambda: {"tokens": [97] * 10**6}),
    "64 KB of stop strings": (
        TEXT,
        lambda: {"prompt": "a", "stop": ["a" * 2000 + chr(i) for i in range(97, 129)]},
    ),
    "500 prompts": (TEXT, lambda: {"prompt": ["a" * 400] * 500, "max_tokens": 4}),
    "500 prompts with options": (
        GEN,
        lambda: {"text": ["a" * 400] * 500, "sampling_params": [{"max_new_tokens": 4}] * 500},
    ),
}


async def answer(server, path, content):
    transport = httpx.ASGITransport(app.create_app(server))
    client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
    headers = {"content-type": "application/json"}
    async with client, stalls.no_long_stall():
        return await client.post(path, content=content, headers=headers)


def post(path, body):
    engine = fake_engine.FakeEngine()
    body = body() if callable(body) else body
    content = body if isinstance(body, bytes) else deep_json(body).encode()
    return asyncio.run(answer(edge.make_state(engine), path, content)), engine


def deep_json(value):
    """Returns JSON of values that may be nested more deeply than any library writes."""
    opened = []
    while isinstance(value, dict | list) and len(value) == 1:
        if isinstance(value, list):
            opened.append(("[", "]"))
            (value,) = value
        else:
            ((key, value),) = value.items()
            opened.append(("{" + orjson.dumps(key).decode() + ":", "}"))
    if isinstance(value, dict):
        inner = ",".join(f"{orjson.dumps(k).decode()}:{deep_json(v)}" for k, v in value.items())
        inner = "{" + inner + "}"
    else:
        inner = orjson.dumps(value).decode()
    return "".join(a for a, _ in opened) + inner + "".join(b for _, b in reversed(opened))


@pytest.mark.parametrize(("path", "body", "param"), REFUSED.values(), ids=REFUSED)
def test_a_hostile_body_is_refused_and_stops_nobody(path, body, param):
    response, engine = post(path, body)
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 6000
    error = edge.error_of(response)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert engine.seen_prompts == []


@pytest.mark.parametrize(("path", "body"), SERVED.values(), ids=SERVED)
def test_a_large_body_is_served_and_stops_nobody(path, body):
    response, _ = post(path, body)
    assert response.status_code == 200, response.text[:300]


BROKEN = [
    (TEXT, {"prompt": "a", "model": "m", "seed": 5, "top_p": 1.0}, "check_integer", "seed"),
    (TEXT, {"prompt": "a", "temperature": 0.5, "user": "u"}, "check_number", "temperature"),
    (GEN, {"text": "a", "sampling_params": {"stop": [], "seed": 5}}, "check_integer", "seed"),
    (GEN, {"text": "a", "sampling_params": {"ignore_eos": True}}, "check_flag", "ignore_eos"),
]


@pytest.mark.parametrize(("path", "body", "check", "param"), BROKEN)
def test_a_check_that_fails_itself_is_a_400_that_names_the_field(
    monkeypatch, path, body, check, param
):
    def broken(value, name, **_):
        if name == param and value:
            raise ZeroDivisionError("secret detail")

    rows = sampling_params._NUMBERS
    broken_rows = [(n, broken if f.__name__ == check else f, bounds) for n, f, bounds in rows]
    monkeypatch.setattr(value_checks, check, broken)
    monkeypatch.setattr(sampling_params, "_NUMBERS", broken_rows)
    response = edge.call(edge.make_state(), path, body)
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == param
    assert "secret" not in response.text


def test_a_model_that_fails_itself_is_a_400_that_names_the_field(monkeypatch):
    monkeypatch.setattr(bodies, "check_rid", lambda rid: 1 // 0)
    body = {"prompt": "a", "model": "m", "rid": "r"}
    response = edge.call(edge.make_state(), TEXT, body)
    assert (response.status_code, edge.error_of(response)["param"]) == (400, "rid")


def test_a_tokenizer_that_fails_on_a_text_is_a_400_that_names_the_prompt():
    class Failing(fake_engine.FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            raise ZeroDivisionError("secret detail")

    for path, body, param in (
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (GEN, {"text": "a"}, "text"),
    ):
        server = edge.make_state(fake_engine.FakeEngine(tokenizer=Failing()))
        response = edge.call(server, path, body)
        assert (response.status_code, edge.error_of(response)["param"]) == (400, param)
        assert "secret" not in response.text


def test_the_limit_of_choices_is_an_option_and_comes_before_any_work():
    class Untouched(fake_engine.FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            raise AssertionError("a text was tokenised")

    server = edge.make_state(
        fake_engine.FakeEngine(tokenizer=Untouched()), max_choices_per_request=7
    )
    for path, body, param in (
        (TEXT, {"prompt": ["a"] * 4, "n": 2}, "prompt"),
        (TEXT, {"prompt": "a", "n": 8}, "n"),
        (GEN, {"text": ["a"] * 8}, "text"),
        (GEN, {"text": ["a"] * 4, "sampling_params": [{}, {"n": 5}, {}, {}]}, "text"),
        ("/tokenize", {"prompt": ["a"] * 8}, "prompt"),
    ):
        response = edge.call(server, path, body)
        assert response.status_code == 400
        error = edge.error_of(response)
        assert error["param"] == param
        assert "--max-choices-per-request" in error["message"]
    chat = {"messages": [message()], "n": 8}
    served = edge.make_state(max_choices_per_request=7)
    assert edge.error_of(edge.call(served, CHAT, chat))["param"] == "n"
    assert edge.call(served, CHAT, chat | {"n": 7}).status_code == 200


def test_a_full_queue_is_told_before_any_work():
    class Untouched(fake_engine.FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            raise AssertionError("a text was tokenised")

    server = edge.make_state(fake_engine.FakeEngine(tokenizer=Untouched(), max_queued=5))
    for path, body in ((TEXT, {"prompt": ["a"] * 3, "n": 2}), (GEN, {"text": ["a"] * 6})):
        response = edge.call(server, path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
