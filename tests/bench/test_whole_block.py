"""The options with which `one_batch` measures prefill, whatever is asked and set."""

import pytest

from jdllm.algorithms import lookup
from jdllm.bench import one_batch
from jdllm.options import sampling_params

OF_A_CALL = [
    {},
    {"algorithm": "SDAR", "remasking_strategy": "low_confidence_static", "denoising_steps": 4},
    {"algorithm": "SDAR", "remasking_strategy": "entropy_bounded", "eb_threshold": 0.1},
    {"algorithm": "MaskedDiffusion", "selection_policy": "leftmost", "max_denoising_steps": 3},
    {"algorithm": "FastDLLM", "factor": 1.5, "block_length": 8},
    {"algorithm": "FastDLLM", "steps": 4, "cache_mode": "dual"},
    {"algorithm": "JointThreshold", "edit_threshold": 0.4},
]
EXPECTED = [
    {"threshold": 0.0},
    {"remasking_strategy": "low_confidence_dynamic", "denoising_steps": 4, "threshold": 0.0},
    {"remasking_strategy": "low_confidence_dynamic", "threshold": 0.0},
    {"selection_policy": "confidence_threshold", "max_denoising_steps": 3, "threshold": 0.0},
    {"block_length": 8, "threshold": 0.0},
    {"cache_mode": "dual", "threshold": 0.0},
    {"edit_threshold": 0.4, "threshold": 0.0},
]
BY_ENTROPY = {"FullAttnMultiBlock", "EntropyThreshold"}  # nats, more than any vocabulary has


def params(options):
    return sampling_params.DllmParams.from_mapping(options)


@pytest.mark.parametrize(("asked", "expected"), [*zip(OF_A_CALL, EXPECTED, strict=True)])
def test_options_that_exclude_a_threshold_do_not_hold(asked, expected):
    name = asked.get("algorithm", "LowConfidence")
    found = one_batch.whole_block(lookup.TABLE[name], asked)
    assert found.pop("algorithm", name) == name
    assert found == expected


@pytest.mark.parametrize("name", lookup.TABLE)
def test_a_server_takes_them_whatever_its_defaults_are(name):
    algorithm = lookup.TABLE[name]
    found = params(one_batch.whole_block(algorithm, {}))
    rules = [{option.name: word} for option in algorithm.options for word in option.words]
    others = [{one: algorithm.option(one).low} for one in algorithm.alternatives]
    for default in ({}, *rules, *others):
        server = params(default | {"algorithm": name}).resolve(params({}))
        resolved = found.resolve(server)
        if algorithm.option("threshold") is not None:
            assert resolved.threshold == (100 if name in BY_ENTROPY else 0)
