"""Bad requests and bad options: refused by name, at no cost to anyone."""

import pytest
from support.tiny_engine import VOCAB, assert_nothing_held, make_engine

from jdllm import errors
from jdllm.options import sampling_params


@pytest.mark.campaign
def test_a_prompt_that_is_too_long_is_reported_as_the_prompt(engine):
    with pytest.raises(errors.RequestTooLong, match="the prompt has 128 tokens") as raised:
        engine.generate(input_ids=[3] * 128, sampling_params={"max_new_tokens": 1})
    assert raised.value.param == "prompt"


@pytest.mark.campaign
def test_choices_that_never_fit_the_queue_are_a_bad_request():
    with make_engine(max_running_requests=1, max_queued_requests=2) as engine:
        params = sampling_params.SamplingParams(n=4, max_new_tokens=1)
        with pytest.raises(errors.RequestError, match="n=4") as raised:
            engine.stream([[1]], params)
        assert (raised.value.param, raised.value.status) == ("n", 400)


@pytest.mark.campaign
@pytest.mark.parametrize("input_ids", [5, [[1], 2], "ab"])
def test_ids_of_a_wrong_shape_are_refused(engine, input_ids):
    with pytest.raises(errors.RequestError) as raised:
        engine.generate(input_ids=input_ids)
    assert raised.value.param == "input_ids"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"input_ids": []}, "prompt"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"prompt": "no tokenizer"}, "prompt"),
        ({}, "prompt"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": -1}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"dllm": {"threshold": 2}}}, "dllm.threshold"),
        ({"input_ids": [1], "sampling_params": {"dllm": {"treshold": 1}}}, "dllm.treshold"),
        ({"input_ids": [1], "sampling_params": {"dllm": {"algorithm": "X"}}}, "dllm.algorithm"),
        (
            {"input_ids": [1], "sampling_params": {"dllm": {"edit_threshold": 0.5}}},
            "dllm.edit_threshold",
        ),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 3.0}}, "frequency_penalty"),
        ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"input_ids": [1], "sampling_params": {"tempratur": 1.0}}, "tempratur"),
    ],
)
def test_bad_requests_are_refused_by_name_and_harm_nobody(engine, kwargs, param):
    with pytest.raises(errors.RequestError) as raised:
        engine.generate(**kwargs)
    assert raised.value.param == param
    assert_nothing_held(engine)


@pytest.mark.campaign
def test_neutral_foreign_parameters_pass(engine):
    params = {"max_new_tokens": 2, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0}
    assert len(engine.generate(input_ids=[1], sampling_params=params)["output_ids"]) == 2


@pytest.mark.campaign
def test_an_uncompiled_algorithm_is_refused(engine):
    with pytest.raises(errors.RequestError, match="not compiled"):
        engine.generate(input_ids=[1], sampling_params={"dllm": {"algorithm": "SDAR"}})


@pytest.mark.campaign
def test_a_pool_too_small_for_a_request_says_so():
    with make_engine(max_total_tokens=32, max_running_requests=1) as engine:
        assert engine.generate(input_ids=[1] * 8, sampling_params={"max_new_tokens": 8})
        with pytest.raises(errors.RequestTooLong, match="KV pages"):
            engine.generate(input_ids=[1] * 8, sampling_params={"max_new_tokens": 40})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"page_size": 12}, "page_size=12"),
        ({"context_length": 4096}, "max_position_embeddings"),
        ({"dllm_algorithm": "LowConfidense"}, "did you mean 'LowConfidence'"),
        ({"dllm_algorithm_config": {"treshold": 0.5}}, "did you mean 'threshold'"),
        ({"dllm_algorithm_config": {"threshold": 7}}, "threshold"),
        ({"tp_size": 64}, "tp_size=64 needs 64 .*, JAX sees"),
        ({"tp_size": 0}, "tp_size=0 must be a positive integer"),
        ({"ep_size": 2}, "tp_size=1: ep_size=2 must be 1 or tp_size"),
        ({"max_total_tokens": 3}, "page"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static"),
        ({"contxt_length": 5}, "did you mean 'context_length'"),
    ],
)
def test_bad_options_are_refused_at_start(options, match):
    with pytest.raises(errors.ConfigError, match=match):
        make_engine(**options)
