"""Every request parameter is honoured, neutral, or refused by its name."""

import dataclasses

import pytest

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.foreign import fields as fields_of_foreign
from jdllm.options.sampling_params import DllmParams, SamplingParams


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
        ({"top_p": -0.1}, "top_p"),
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
        ({"min_new_tokens": 4.5}, "min_new_tokens"),
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


@pytest.mark.parametrize("name", sorted(fields_of_foreign.NEUTRAL_ONLY))
def test_neutral_values_of_foreign_fields_pass(name):
    for value in fields_of_foreign.NEUTRAL_ONLY[name]:
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
    for algorithm, declared in lookup.TABLE.items():
        for name, value in declared.defaults.items():
            assert getattr(DllmParams(algorithm=algorithm, **{name: value}), name) == value
    with pytest.raises(AttributeError, match="treshold"):
        _ = DllmParams().treshold


INTEGERS = {
    "max_new_tokens": 8, "max_tokens": 8, "min_new_tokens": 8, "min_tokens": 8, "top_k": 8,
    "seed": -8, "n": 8, "logprobs": 8,
}  # fmt: skip
HOLDERS = (SamplingParams.from_mapping, lambda options: SamplingParams(**options))


@pytest.mark.parametrize("make", HOLDERS)
def test_a_whole_number_may_be_written_as_a_float_and_nothing_else_is_one(make):
    for name, value in INTEGERS.items():
        assert make({name: float(value)}) == make({name: value})
        for wrong in (
            value + 0.5,
            float("inf"),
            str(value),
            *([True] if name != "logprobs" else []),
        ):
            with pytest.raises(errors.RequestError) as raised:
                make({name: wrong})
            assert raised.value.param in (name, name.replace("max_", "max_new_"), "min_new_tokens")
    lists = {"stop_token_ids": [5.0, 6], "allowed_token_ids": (6.0,), "logit_bias": {7.0: 1}}
    assert make(lists) == make(
        {"stop_token_ids": [5, 6], "allowed_token_ids": [6], "logit_bias": {"7": 1}}
    )
    assert make({"top_logprobs": 8.0, "return_logprob": True}).top_logprobs == 8
    found = make({"seed": 2.0**60, "stop_token_ids": [1.0], "top_k": 3.0})
    assert {type(one) for one in (found.seed, found.top_k, *found.stop_token_ids)} == {int}
    for name, wrong in {"stop_token_ids": [1.5], "logit_bias": {1.5: 1}}.items():
        with pytest.raises(errors.RequestError):
            make({name: wrong})


def test_integers_among_the_denoising_options_may_be_floats_too():
    integers = [
        (name, option)
        for name, algorithm in lookup.TABLE.items()
        for option in algorithm.options
        if option.type == "integer"
    ]
    assert len(integers) > 5
    for name, option in integers:
        value = int(option.high if option.default is None else option.default)
        held = getattr(DllmParams(algorithm=name, **{option.name: float(value)}), option.name)
        assert (held, type(held)) == (value, int)
        for wrong in (value + 0.5, True):
            with pytest.raises(errors.RequestError, match=option.name):
                DllmParams(algorithm=name, **{option.name: wrong})


def test_a_nucleus_of_nothing_is_the_most_probable_token():
    for zero in (0, 0.0, -0.0):
        params = SamplingParams(top_p=zero, temperature=3.0, seed=7)
        assert (params.temperature, params.top_p) == (0.0, 1.0)
    # Also where an algorithm draws in its own way, and knows no top_p.
    for name, declared in lookup.TABLE.items():
        params = SamplingParams(top_p=0, temperature=1, dllm={"algorithm": name})
        assert params.temperature == 0, declared.name


def test_log_probabilities_may_be_asked_for_as_in_vllm():
    for form, count in ((True, 0), (0, 0), (1, 1), (5, 5), (5.0, 5)):
        for params in (
            SamplingParams(logprobs=form),
            SamplingParams.from_mapping({"logprobs": form}),
        ):
            assert (params.return_logprob, params.top_logprobs) == (True, count)
            assert params == SamplingParams(return_logprob=True, top_logprobs=count)
    for form in (None, False):
        assert SamplingParams(logprobs=form) == SamplingParams()
    assert SamplingParams(logprobs=True, top_logprobs=2).top_logprobs == 2
    for wrong in ({"logprobs": -1}, {"logprobs": 21}, {"logprobs": 3, "top_logprobs": 2}):
        with pytest.raises(errors.RequestError, match="logprobs"):
            SamplingParams(**wrong)


def test_empty_values_ask_for_nothing():
    fields = {field.name for field in dataclasses.fields(SamplingParams)} | {"sampling_seed", "zzz"}
    flags = {field.name for field in dataclasses.fields(SamplingParams) if field.type == "bool"}
    for name in sorted(fields):
        for empty in ("", [], {}, False, None):
            if (empty is False and name in flags) or (
                empty is not None and name == "allowed_token_ids"
            ):
                continue
            assert SamplingParams.from_mapping({name: empty}) == SamplingParams(), (name, empty)
    assert not SamplingParams.from_mapping({"skip_special_tokens": False}).skip_special_tokens
    for wrong in ({"skip_special_token": False}, {"allowed_token_ids": []}):
        with pytest.raises(errors.RequestError):
            SamplingParams.from_mapping(wrong)
    for name in (*lookup.option_names(), "algorithm", "stream_mode", "zzz"):
        for empty in ("", [], {}, None):
            assert DllmParams.from_mapping({name: empty}) == DllmParams()
    assert DllmParams.from_mapping({"early_stop": False}).early_stop is False
    with pytest.raises(errors.RequestError, match="early_stop"):
        DllmParams.from_mapping({"earlystop": False})


def test_half_a_character_is_no_stop_string_and_no_bad_word():
    for options in ({"stop": ["a", "b\ud800"]}, {"stop": "\udfff"}, {"bad_words": ["\ud83c"]}):
        with pytest.raises(errors.RequestError, match="lone surrogate") as raised:
            SamplingParams(**options)
        assert raised.value.param in options
