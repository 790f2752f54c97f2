"""`echo` on /v1/completions: every choice begins with the text of its prompt, also in streams."""

from __future__ import annotations

import pytest
from support import edge, fake_engine

TEXT = "/v1/completions"


def body(prompt, **fields):
    return {"prompt": prompt, "max_tokens": 6} | fields


PROMPTS = {
    "text": ("hi", ["hi"]),
    "texts": (["hi", "you"], ["hi", "you"]),
    "ids": (list(b"hi"), ["hi"]),
    "lists of ids": ([list(b"hi"), list("é".encode())], ["hi", "é"]),
    "a long text": ("long " * 80, ["long " * 80]),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("prompt", "texts"), PROMPTS.values(), ids=PROMPTS)
def test_every_choice_begins_with_its_prompt(prompt, texts, n):
    wanted = [
        text + fake_engine.expected_text(text, 6, choice) for text in texts for choice in range(n)
    ]
    content = body(prompt, n=n, echo=True)
    answer = edge.call(edge.make_state(), TEXT, content).json()
    assert [choice["text"] for choice in answer["choices"]] == wanted
    streamed = [""] * len(wanted)
    for frame in edge.frames(edge.call(edge.make_state(), TEXT, content | {"stream": True})):
        (choice,) = frame["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == wanted
    plain = edge.call(edge.make_state(), TEXT, body(prompt, n=n)).json()
    assert answer["usage"] == plain["usage"]


@pytest.mark.parametrize("echo", [None, False])
def test_without_echo_there_is_none(echo):
    answer = edge.call(edge.make_state(), TEXT, body("hi", echo=echo)).json()
    assert answer["choices"][0]["text"] == fake_engine.expected_text("hi", 6)


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_echo_with_logprobs_is_refused_with_the_reason(logprobs):
    response = edge.call(edge.make_state(), TEXT, body("hi", echo=True, logprobs=logprobs))
    assert response.status_code == 400
    error = edge.error_of(response)
    assert error["param"] == "echo"
    assert "no chain-rule likelihood" in error["message"]
    neutral = body("hi", echo=True, logprobs=None)
    assert edge.call(edge.make_state(), TEXT, neutral).status_code == 200


def test_logprobs_of_a_wrong_type_are_named_before_echo_is():
    response = edge.call(edge.make_state(), TEXT, body("hi", echo=True, logprobs=[1]))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
