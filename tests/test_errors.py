"""What errors quote: at most a part of a line, in a time that no value can make long."""

import json
import time

import pytest

from jdllm import errors


def deep(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5, "text", "", b"x", [], {}, (), [1, "a"], {"a": [1]}, (1, 2), [[]], [{}]],
    ids=repr,
)
def test_short_values_are_quoted_as_python_writes_them(value):
    assert errors.quote(value) == repr(value)


# Made one by one: all of them together fill 150 MB.
HUGE = {
    "text": lambda: "a\n" * 10**7,
    "bytes": lambda: b"\0" * 10**7,
    "integer": lambda: 10**100_000,
    "list": lambda: [1] * 10**6,
    "dict": lambda: {i: i for i in range(10**6)},
    "deep list": lambda: deep(100_000, lambda value: [value]),
    "deep dict": lambda: deep(100_000, lambda value: {"a": value}),
    "wide and deep": lambda: deep(1000, lambda value: [value, value]),
    "long items": lambda: ["a" * 10**6] * 3,
    "long keys": lambda: {"a" * 10**6: 1},
    "object": lambda: object(),
}


@pytest.mark.parametrize("make", HUGE.values(), ids=HUGE)
def test_a_huge_value_is_quoted_within_a_line_and_at_once(make):
    value = make()
    began = time.monotonic()
    text = errors.quote(value)
    assert time.monotonic() - began < 0.5
    assert len(text) <= errors.QUOTED_CHARACTERS
    assert "\n" not in text


def test_the_texts_of_an_error_are_bounded_too():
    error = errors.RequestError("m" * 10**6, param="p" * 10**6)
    assert len(str(error)) == errors.MESSAGE_CHARACTERS
    assert error.param is not None and len(error.param) == errors.NAME_CHARACTERS
    assert len(json.dumps(error.args)) < 5000
    assert errors.RequestError("short", param="name").param == "name"


def test_no_near_match_is_looked_for_in_a_huge_name():
    began = time.monotonic()
    assert errors.nearest("a" * 10**7, ["aa", "b"]) == "; known: aa, b"
    assert errors.nearest(["aa"], ["aa", "b"]) == "; known: aa, b"
    assert errors.nearest("aaa", ["aa", "b"]) == "; did you mean 'aa'?"
    assert time.monotonic() - began < 0.5
