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


@pytest.mark.parametrize("body", [CACHE, SCORE, SCORE_AND_WRITE, SCORE_IN_A_LIST])
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
