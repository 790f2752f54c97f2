"""Unknown options offline and at start: the error says what is written instead."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from jdllm import errors
from jdllm.engine import llm
from jdllm.engine.images import engine
from jdllm.foreign import names as foreign_names
from jdllm.options import config, sampling_params
from jdllm.server import cli

SamplingParams = sampling_params.SamplingParams


def start(**options):
    return config.from_mapping(config.EngineConfig, options)


def defaults(**options):
    return start(dllm_algorithm_config=options).algorithm_options()


def image(**options):
    return engine.ImageEngine.generate(None, "a cat", **options)  # type: ignore[arg-type]


def text(**options):
    return llm.LLM.generate(None, "hi", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        (SamplingParams, "steps", "; write dllm.steps"),
        (SamplingParams, "max_length", "; write max_new_tokens"),
        (SamplingParams, "temprature", "; did you mean 'temperature'?"),
        (image, "steps", "; write num_inference_steps"),
        (image, "num_images", "; write num_images_per_prompt"),
        (image, "cfg_scale", "; write guidance_scale"),
        (image, "image_size", "; write width and height"),
        (text, "temperature", "; write sampling_params.temperature"),
        (text, "threshold", "; write sampling_params.dllm.threshold"),
        (start, "threshold", "; write dllm_algorithm_config.threshold"),
        (start, "temperature", "; write temperature with the request"),
        (start, "max_model_len", "; write context_length"),
        (start, "quux", ""),
        (defaults, "num_steps", "; write steps"),
        (defaults, "gen_length", "; write max_new_tokens with the request"),
        (defaults, "quux", ""),
    ],
)
def test_an_unknown_name_is_answered_by_what_is_served(call, name, hint):
    with pytest.raises((TypeError, errors.ConfigError)) as refused:
        call(**{name: 8})
    message = str(refused.value)
    assert f"'{name}'" in message and message.endswith(hint)
    assert "known:" not in message and len(message) <= errors.HINT_CHARACTERS


def test_flags_are_answered_likewise(capsys):
    for flag, hint in (
        ("--threshold", "; write threshold in the file of --dllm-algorithm-config"),
        ("--gen-length", "; write max_new_tokens with the request"),
        ("--contxt-length", "; did you mean --context-length?"),
        # Refused flags and those without effect are no suggestion.
        ("--moe-dense-tp-siz", "; --help lists the options"),
        ("--attention-backen", "; --help lists the options"),
    ):
        with pytest.raises(SystemExit):
            cli.parse([flag, "1"])
        assert capsys.readouterr().err.endswith(f"unknown option '{flag}'{hint}\n")


def test_a_name_is_in_one_row_and_every_hint_is_a_line():
    for rows in (foreign_names.TEXT, foreign_names.IMAGES):
        names = [name for row in rows for name in row.names.split()]
        assert len(names) == len(set(names))
        for row in rows:
            assert max(len(row.say), len(row.otherwise)) < errors.HINT_CHARACTERS


def test_params_are_copied_as_before():
    params = SamplingParams(temperature=0.5)
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert dataclasses.replace(params, seed=5).seed == 5
