"""What the client of SGLang's language (0.5.23) sends to /generate."""

from __future__ import annotations

import pytest
from support import edge, fake_engine

PATH = "/generate"
# `select` first asks for nothing, to have the prefix cached, and then for the prompts' likelihoods.
CACHE = {"text": "The sky is", "sampling_params": {"max_new_tokens": 0}}
SCORE = {
    "text": ["The sky is blue", "The sky is green"],
    "sampling_params": {"max_new_tokens": 0, "temperature": 0},
    "return_logprob": True,
    "return_text_in_logprobs": True,
    "logprob_start_len": 1,
}
SCORE_AND_WRITE = SCORE | {"sampling_params": {"max_new_tokens": 1}}
SCORE_IN_A_LIST = SCORE | {"logprob_start_len": -1, "sampling_params": [{"max_new_tokens": 0}] * 2}


SCORE_FROM_THE_START = SCORE | {"logprob_start_len": 0, "text": "The sky is blue"}
SCORE_BY_ONE_FIELD = {"text": "hi", "return_logprob": True, "sampling_params": {"max_tokens": 0}}


def test_the_first_question_of_select_counts_the_prompt():
    engine = fake_engine.FakeEngine()
    answer = edge.call(edge.make_state(engine), PATH, CACHE).json()
    assert answer["meta_info"]["prompt_tokens"] == len(CACHE["text"])
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert engine.seen_prompts == []


@pytest.mark.parametrize(
    "body",
    [SCORE, SCORE_AND_WRITE, SCORE_IN_A_LIST, SCORE_FROM_THE_START, SCORE_BY_ONE_FIELD],
)
def test_select_is_refused_and_told_why(body):
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), PATH, body)
    assert response.status_code == 400
    assert "no chain-rule likelihood" in edge.error_of(response)["message"]
    assert engine.seen_prompts == []


def test_gen_is_answered():
    params = {"max_new_tokens": 8, "temperature": 0, "spaces_between_special_tokens": True}
    params |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "top_p": 1.0, "top_k": -1}
    params |= {"min_new_tokens": 0, "min_p": 0.0, "ignore_eos": False, "regex": None}
    body = {"text": "hi", "sampling_params": params | {"stop": [], "json_schema": None}}
    answer = edge.call(edge.make_state(), PATH, body).json()
    assert answer["text"] == fake_engine.expected_text("hi", 8)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 0}, {"max_tokens": 0}])
@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_means_the_prompt_only(limit, stream):
    engine = fake_engine.FakeEngine()
    params = limit | {"n": 2}
    body = {"text": ["hi", "you"], "sampling_params": params, "return_step_map": True}
    response = edge.call(edge.make_state(engine), PATH, body | {"stream": stream})
    replies = edge.frames(response) if stream else response.json()
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 2, 3, 3]
    for reply in replies:
        assert (reply["text"], reply["output_ids"]) == ("", [])
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert reply["meta_info"]["step_map"] == []
    assert engine.seen_prompts == []


@pytest.mark.parametrize(
    "params",
    [
        [{"max_new_tokens": 0}, {"max_new_tokens": 4}],
        [{"max_new_tokens": 0}, {}],
        {"max_new_tokens": True},
        {"max_new_tokens": 0.5},
        {"max_new_tokens": -1},
        {"max_new_tokens": 0, "max_tokens": 4},
        {"max_new_tokens": 0, "temperature": -1},
    ],
)
def test_other_limits_are_refused(params):
    response = edge.call(edge.make_state(), PATH, {"text": ["a", "b"], "sampling_params": params})
    assert response.status_code == 400
    assert edge.error_of(response)["param"] in ("max_new_tokens", "max_tokens", "temperature")
