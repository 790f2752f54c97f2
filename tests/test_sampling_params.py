"""Every request parameter is honoured, neutral, or refused by its name."""

import pytest

from jdllm import algorithms, errors, sampling_params
from jdllm.sampling_params import DllmParams, SamplingParams


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_tokens": -3}, "max_new_tokens"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"dllm": 3}, "dllm"),
        ({"dllm": {"algorithm": "LowConfidence", "threshold": 1.1}}, "dllm.threshold"),
        ({"dllm": {"threshold": "a"}}, "dllm.threshold"),
        ({"dllm": {"edit_threshold": -1}}, "dllm.edit_threshold"),
        ({"dllm": {"max_post_edit_steps": -1}}, "dllm.max_post_edit_steps"),
        ({"dllm": {"penalty_lambda": -0.5}}, "dllm.penalty_lambda"),
        ({"dllm": {"algorithm": "Fast"}}, "dllm.algorithm"),
        ({"dllm": {"block_size": 8}}, "dllm.block_size"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_new_tokens": 4.0}, "min_new_tokens"),
        ({"regex": "a*"}, "regex"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"max_new_token": 4}, "max_new_token"),
    ],
)
def test_a_bad_value_is_refused_by_name(options, param):
    with pytest.raises(errors.RequestError) as raised:
        SamplingParams.from_mapping(options)
    assert raised.value.param == param
    assert raised.value.status == 400


@pytest.mark.parametrize("name", sorted(sampling_params.NEUTRAL_ONLY))
def test_neutral_values_of_foreign_fields_pass(name):
    for value in sampling_params.NEUTRAL_ONLY[name]:
        assert SamplingParams.from_mapping({name: value}) == SamplingParams()


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(errors.RequestError, match="did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(errors.RequestError, match="did you mean 'threshold'"):
        DllmParams.from_mapping({"treshold": 1})


def test_max_tokens_is_an_alias_and_null_means_absent():
    assert SamplingParams.from_mapping({"max_tokens": 7, "top_p": None}).max_new_tokens == 7
    assert SamplingParams(max_tokens=7) == SamplingParams(max_new_tokens=7)
    assert SamplingParams.from_mapping({"sampling_seed": 3}).seed == 3


def test_server_defaults_apply_to_the_same_algorithm_only():
    default = DllmParams(algorithm="JointThreshold", threshold=0.7, edit_threshold=0.4)
    same = DllmParams(penalty_lambda=1.0).resolve(default)
    assert same == DllmParams(
        algorithm="JointThreshold",
        threshold=0.7,
        edit_threshold=0.4,
        max_post_edit_steps=16,
        penalty_lambda=1.0,
    )
    other = DllmParams(algorithm="LowConfidence").resolve(default)
    assert other == DllmParams(algorithm="LowConfidence", threshold=0.95)


def test_every_algorithm_option_is_a_field_of_the_request():
    for algorithm, declared in algorithms.TABLE.items():
        for name, value in declared.defaults.items():
            assert getattr(DllmParams(algorithm=algorithm, **{name: value}), name) == value
    with pytest.raises(AttributeError, match="treshold"):
        _ = DllmParams().treshold
