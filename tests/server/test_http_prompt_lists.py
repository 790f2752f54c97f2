"""Lists of prompts over HTTP: one submission each, all or none, over a real engine.

The model is computable (`support/hash_engine.py`), so nothing is compiled.
"""

from __future__ import annotations

import pytest
from support import edge, hash_engine
from support.hash_model import CONTEXT, decode_text

from jdllm.options import sampling_params

PLACES = hash_engine.ROWS + hash_engine.QUEUE
LONG = "e" * CONTEXT
SEED = {"seed": 5, "ignore_eos": True}


@pytest.fixture
def engine():
    with hash_engine.make_engine() as running:
        yield running


def completion(prompts, **fields):
    return "/v1/completions", {"prompt": prompts, "max_tokens": 9, **SEED} | fields


def native(prompts, **fields):
    options = {"max_new_tokens": 9, **SEED}
    return "/generate", {"text": prompts, "sampling_params": options} | fields


def native_ids(prompts, **fields):
    path, body = native(prompts, **fields)
    body["input_ids"] = [hash_engine.LetterTokenizer().encode(text) for text in body.pop("text")]
    return path, body


ROUTES = [(completion, "prompt"), (native, "text"), (native_ids, "input_ids")]


def texts(prompts, n):
    params = sampling_params.SamplingParams(max_new_tokens=9, n=n, **SEED)
    ids = [hash_engine.LetterTokenizer().encode(prompt) for prompt in prompts]
    return [
        decode_text(hash_engine.expected(one, params, choice)) for one in ids for choice in range(n)
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_a_list_gets_what_its_prompts_get_alone(engine, n):
    server, prompts = edge.make_state(engine), ["eee", "fgh", "i"]
    path, body = completion(prompts, n=n)
    choices = edge.call(server, path, body).json()["choices"]
    assert [choice["text"] for choice in choices] == texts(prompts, n)
    streamed = [""] * len(choices)
    for frame in edge.frames(edge.call(server, path, body | {"stream": True})):
        (choice,) = frame["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts(prompts, n)
    path, body = native(prompts)
    body["sampling_params"]["n"] = n
    replies = edge.call(server, path, body).json()
    assert [reply["text"] for reply in replies] == texts(prompts, n)
    frames = edge.frames(edge.call(server, path, body | {"stream": True}))
    assert [text for _, text in sorted({one["index"]: one["text"] for one in frames}.items())] == (
        texts(prompts, n)
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "field"), ROUTES)
def test_a_prompt_that_is_too_long_refuses_the_list_and_nothing_runs(engine, route, field, stream):
    path, body = route(["eee", LONG, "f"], stream=stream)
    response = edge.call(edge.make_state(engine), path, body)
    assert response.status_code == 400
    error = edge.error_of(response)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert hash_engine.num_requests(engine) == 0
    assert engine._built.runner.num_launches == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "field"), ROUTES)
def test_a_list_that_can_never_fit_is_refused_by_name(engine, route, field, stream):
    path, body = route(["eee"] * (PLACES + 1), stream=stream)
    response = edge.call(edge.make_state(engine), path, body)
    assert response.status_code == 400
    error = edge.error_of(response)
    assert error["param"] == field
    assert f"a list of {PLACES + 1} prompts with {PLACES + 1} choices" in error["message"]
    assert hash_engine.num_requests(engine) == 0


def test_the_choices_of_all_prompts_count(engine):
    server = edge.make_state(engine)
    path, body = completion(["e"] * 2, n=PLACES // 2)
    assert edge.call(server, path, body).status_code == 200
    assert edge.error_of(edge.call(server, path, body | {"n": PLACES // 2 + 1}))["param"] == (
        "prompt"
    )
    path, body = completion("e", n=PLACES + 1)
    assert edge.error_of(edge.call(server, path, body))["param"] == "n"


def test_a_limit_is_named_as_the_list_names_it(engine):
    server = edge.make_state(engine)
    for name in ("max_tokens", "max_new_tokens"):
        options = [{name: 4}, {name: CONTEXT}]
        path, body = native(["e", "f"], sampling_params=options)
        error = edge.error_of(edge.call(server, path, body))
        assert (error["param"], name in error["message"]) == (name, True)
    assert hash_engine.num_requests(engine) == 0


def test_an_id_in_use_refuses_the_list(engine):
    path, body = native(["e", "f"], rid=["a", "a"])
    assert edge.error_of(edge.call(edge.make_state(engine), path, body))["param"] == "rid"
    assert hash_engine.num_requests(engine) == 0
