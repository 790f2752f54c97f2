"""Every key of a config.json with odd values: a value is accepted, or the error names file and key.

`integers that overflow a float`, NaN and Infinity are JSON that Python reads.
"""

import json
import pathlib

import pytest

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.models import loading, registry

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = {
    "jdllm-nano": source.bundled_model("jdllm-nano"),
    "dream-7b": ROOT / "configs/dream-7b",
    "llada-8b": ROOT / "configs/llada-8b",
    "llada-moe-7b-a1b": ROOT / "configs/llada-moe-7b-a1b",
    "sdar-30b-a3b": ROOT / "configs/sdar-30b-a3b",
    "fast-dllm-v2-1.5b": ROOT / "configs/fast-dllm-v2-1.5b",
    "nemotron-labs-diffusion-8b": ROOT / "configs/nemotron-labs-diffusion-8b",
}
NAN, INFINITY = float("nan"), float("inf")
ODD = [
    NAN,
    INFINITY,
    -INFINITY,
    -1,
    -(10**400),
    10**400,
    10**12,
    1e400,
    -0.5,
    True,
    "x",
    "x" * 10_000,
    [],
    [[1]],
    {"a": {}},
    None,
]


def parsed(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return loading.read_spec(directory)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_key_is_read_or_refused_by_name(name, tmp_path):
    config = json.loads((CONFIGS[name] / "config.json").read_text())
    rules = registry.family(registry.architecture_of(config)).rules
    keys = {*config, *rules.only, *rules.neutral, *rules.read, "eos_token_id", "block_size"}
    keys |= {"rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim", "block_length"}
    keys |= {"layer_types", "model_type"}
    for key in sorted(keys):
        for value in ODD:
            try:
                parsed(tmp_path, config | {key: value})
            except errors.ConfigError as error:
                assert key in str(error), f"{key}={value!r}"
                assert len(str(error)) < 1000, "an error quotes at most a line"


@pytest.mark.parametrize("value", [NAN, INFINITY, -1e-6, 0, 10**400, True, "1e-6"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_numbers_must_be_finite_and_positive(key, value, tmp_path):
    config = json.loads((CONFIGS["jdllm-nano"] / "config.json").read_text())
    with pytest.raises(errors.ConfigError, match=rf"config.json: {key}="):
        parsed(tmp_path, config | {key: value})


@pytest.mark.parametrize("value", [-64, 0, 2**31, 10**400, 64.0, NAN, True, "64"])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "block_size"])
def test_sizes_must_be_positive_integers_of_32_bits(key, value, tmp_path):
    config = json.loads((CONFIGS["jdllm-nano"] / "config.json").read_text())
    with pytest.raises(errors.ConfigError, match=rf"config.json: {key}="):
        parsed(tmp_path, config | {key: value})
