"""Bodies are counted before they are parsed: exactly, and in no more memory than their bytes."""

from __future__ import annotations

import json
import random
import tracemalloc

import orjson
import pytest

from jdllm import errors
from jdllm.server.edge import bodies, body_limits
from jdllm.server.openai.requests import CompletionRequest


def parsed_or_refused(body):
    try:
        bodies.parse(body, CompletionRequest)
    except errors.RequestError:
        return
    raise AssertionError("the body was taken")


def test_a_body_of_too_many_values_takes_no_more_memory_than_its_bytes():
    for body in (
        orjson.dumps({"prompt": ["a"] * 10**6, "n": 128}),
        b'{"prompt": [' + b"[]," * 10**6 + b"[]]}",
        b'{"prompt": [' + b'"\\"",' * 10**6 + b'""]}',
    ):
        tracemalloc.start()
        parsed_or_refused(body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * len(body) + 8 * body_limits.CHUNK_BYTES


def random_json(rng, depth):
    """Returns a value whose strings are full of what the counts look for."""
    kind = rng.choice(["string", "string", "number", "list", "object"] if depth else ["string"])
    text = "".join(rng.choices('ab,[]{}"\\: é', k=rng.randint(0, 5)))
    if kind == "string":
        return text
    if kind == "number":
        return rng.choice([1, -2.5, None, True])
    values = [random_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return values if kind == "list" else {f"{text}{i}": one for i, one in enumerate(values)}


def counted(value):
    """Returns (depth, containers, strings, separated values) of a value, by walking it."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0, 0
    items = list(value.values()) if isinstance(value, dict) else value
    parts = [counted(item) for item in items]
    return (
        1 + max((part[0] for part in parts), default=0),
        1 + sum(part[1] for part in parts),
        sum(part[2] for part in parts) + (len(items) if isinstance(value, dict) else 0),
        sum(part[3] for part in parts) + max(0, len(items) - 1),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_values_of_a_body_are_counted_exactly(monkeypatch, seed):
    rng = random.Random(seed)
    names = ("MAX_DEPTH", "MAX_CONTAINERS", "MAX_STRINGS", "MAX_VALUES")
    for _ in range(50):
        value = {"a": random_json(rng, 4)}
        body = orjson.dumps(value) if rng.random() < 0.5 else json.dumps(value).encode()
        counts = counted(value)
        monkeypatch.setattr(body_limits, "CHUNK_BYTES", rng.randint(1, 9))
        for name, count in zip(names, counts, strict=True):
            monkeypatch.setattr(body_limits, name, count)
        body_limits.check(body)
        for name, count in zip(names, counts, strict=True):
            if count:
                monkeypatch.setattr(body_limits, name, count - 1)
                with pytest.raises(errors.RequestError, match=f"more than {count - 1} "):
                    body_limits.check(body)
                monkeypatch.setattr(body_limits, name, count)
