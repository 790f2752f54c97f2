"""Requests that are too long: OpenAI's words and code, by which clients turn to another model."""

from __future__ import annotations

import pytest

from jdllm import errors
from jdllm.options import sampling_params
from jdllm.scheduler import limits, request

LIMITS = limits.Limits(
    context_length=64, block_size=4, page_size=4, num_pages=8, has_tokenizer=True
)
# litellm 1.106 compares with this (lower case) in
# `ExceptionCheckers.is_error_str_context_window_exceeded`; OpenAI's own text begins like it.
OPENAI = "this model's maximum context length is 64 tokens"


def make(prompt, wanted):
    return request.Request(
        request_id="r",
        prompt_ids=[5] * prompt,
        sampling=sampling_params.SamplingParams(max_new_tokens=wanted),
        max_new_tokens=wanted,
    )


@pytest.mark.parametrize(("prompt", "wanted"), [(64, 1), (1000, 1), (60, 5), (1, 64)])
def test_a_request_over_the_context_says_so_in_openais_words(prompt, wanted):
    with pytest.raises(errors.RequestTooLong) as refused:
        LIMITS.check(make(prompt, wanted))
    assert OPENAI in str(refused.value).lower()
    assert str(prompt) in str(refused.value)
    assert refused.value.code == "context_length_exceeded"


def test_so_does_a_request_over_the_pool():
    LIMITS.check(make(20, 20))
    with pytest.raises(errors.RequestTooLong, match="10 KV pages") as refused:
        LIMITS.check_pages(make(20, 20), 40)
    assert OPENAI in str(refused.value).lower()
    assert refused.value.code == "context_length_exceeded"
    LIMITS.check_pages(make(12, 20), 32)
