"""Nemotron-Labs-Diffusion against stored logits of both of its forwards, and its configs."""

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import errors, spec
from jdllm.layers import attention, rope
from jdllm.models import loading, registry
from jdllm.runner import full_forward

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "data" / "goldens" / "nemotron_diffusion"
ATOL, RTOL = 2e-4, 1e-4  # the goldens' tolerance for float32 logits
TINY = json.loads((FOLDER / "config.json").read_text())
ROPE = TINY["rope_parameters"]


def parse(config, **options):
    return registry.family(registry.architecture_of(config)).parse_config(config, **options)


def golden(name):
    return np.load(FOLDER / f"{name}.npy")


@pytest.fixture(scope="module")
def full():
    return full_forward.load_model(FOLDER, dtype="float32")


def test_logits_of_the_causal_forward_are_the_reference_s(full):
    """Of 40 positions, so beyond the original length of 32: frequencies and query scale count."""
    found = full.logits(golden("inputs"))
    np.testing.assert_allclose(found, golden("logits_causal"), atol=ATOL, rtol=RTOL)


def test_logits_of_a_block_behind_its_context_are_the_reference_s(full):
    ids, model = golden("inputs"), full.model
    rows, length = ids.shape
    module = loading.merge(model.graphdef, model.params)
    hidden, _ = module(
        jnp.asarray(ids).reshape(-1),
        jnp.tile(jnp.arange(length), rows),
        attend=attention.dense_attend(golden("attn_mask"), rows),
        caches=[None] * model.spec.num_layers,
    )
    found = module.logits(hidden).reshape(rows, length, -1)
    np.testing.assert_allclose(found, golden("logits"), atol=ATOL, rtol=RTOL)


def test_a_score_is_that_of_the_row_before_the_token(full):
    ids, logits = golden("inputs"), golden("logits_causal").astype(np.float64)
    places = np.array([[1, 30, 39], [5, 6, 32]])
    tokens = np.take_along_axis(ids, places, axis=1)
    found = full.token_scores(ids, np.full(2, ids.shape[1]), places, tokens)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for r, p in np.ndindex(places.shape):
        expected = logprobs[r, places[r, p] - 1, tokens[r, p]]
        assert found.logprob[r, p] == pytest.approx(expected, abs=ATOL)
    with pytest.raises(ValueError, match=r"\[1, length"):
        full.token_scores(ids, np.full(2, ids.shape[1]), places * 0, tokens)


@pytest.mark.parametrize(
    ("size", "tensors", "parameters", "theta"),
    [("3b", 237, 3.83e9, 1e6), ("8b", 309, 8.49e9, 1e6), ("14b", 363, 13.51e9, 1e9)],
)
def test_published_sizes_have_the_published_tensors(size, tensors, parameters, theta, caplog):
    """Counts of tensors and of parameters are those of the releases."""
    folder = ROOT / "configs" / f"nemotron-labs-diffusion-{size}"
    with caplog.at_level("WARNING"):
        config = parse(json.loads((folder / "config.json").read_text()))
    assert not caplog.text, "every key is known"
    rows = registry.family(config.spec.architecture).weight_rows(config)
    assert len(rows) == tensors
    assert sum(math.prod(row.shape) for row in rows) == pytest.approx(parameters, abs=5e6)
    assert config.layers[0].attention.rope.theta == theta
    diffusion = config.spec.diffusion
    assert diffusion.kind == "block" and diffusion.is_causal
    assert diffusion.logit_alignment is spec.LogitAlignment.SAME_POSITION
    assert (diffusion.block_size, diffusion.mask_token_id) == (32, 100)
    assert diffusion.eos_token_ids == (11,)


def yarn(**options):
    defaults = {"factor": 16.0, "original_length": 16384, "beta_fast": 32.0, "beta_slow": 1.0}
    return rope.Yarn(**defaults | {"mscale": 1.0, "mscale_all_dim": 1.0} | options)


def test_frequencies_are_kept_divided_or_between():
    """Of 64 pairs; one that turns n times in 16384 tokens has the frequency 2 pi n / 16384."""
    found = yarn().frequencies(128, 1e6)
    plain = 1e6 ** (-np.arange(64) / 64)
    turns = plain * 16384 / (2 * np.pi)
    low, high = np.flatnonzero(turns > 32)[-1], np.flatnonzero(turns < 1)[0]
    np.testing.assert_allclose(found[: low + 1], plain[: low + 1], rtol=1e-6)
    np.testing.assert_allclose(found[high:], plain[high:] / 16, rtol=1e-6)
    between = (plain / found)[low + 1 : high]
    assert np.all(np.diff(between) > 0) and between[0] > 1 and between[-1] < 16
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    expected = plain[middle] * (1 - share + share / 16)
    assert found[middle] == pytest.approx(expected, rel=1e-6)


def test_cos_and_sin_are_multiplied_by_the_quotient_of_the_scales():
    positions = jnp.arange(3)
    sizes = {"rotary_dim": 8, "theta": 1e4}
    same = rope.rope_angles(positions, yarn=yarn(), **sizes)
    other = rope.rope_angles(positions, yarn=yarn(mscale=2.0, mscale_all_dim=0.5), **sizes)
    quotient = (0.2 * math.log(16) + 1) / (0.05 * math.log(16) + 1)
    np.testing.assert_allclose(np.array(other), np.array(same) * quotient, rtol=1e-6)
    assert yarn(factor=0.25, mscale=2.0).amplitude == 1.0


def test_queries_grow_with_the_logarithm_of_the_lengths_before_them():
    scale = rope.QueryScale(beta=0.1, length=32)
    found = scale.at(jnp.array([0, 31, 32, 63, 64, 3200]))
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    np.testing.assert_allclose(found, [*expected, 1 + 0.1 * math.log(101)], rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dlm_paradigm", "block_diff"),
        ("dlm_type", "dream"),
        ("linear_spec_lora", "linear_spec_lora"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 4096),
        ("use_qk_norm", True),
        ("num_experts", 8),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_theta", 5e5),  # rope_parameters says 10000
        ("mask_token_id", 96),
        ("quantization_config", {"bits": 4}),
        ("num_key_value_heads", 3),
    ],
)
def test_a_contradicting_key_is_refused_by_name(key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse({**TINY, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", "llama3"),
        ("rope_type", "default"),
        ("factor", None),
        ("factor", -1),
        ("original_max_position_embeddings", None),
        ("original_max_position_embeddings", 32.0),
        ("beta_slow", 0),
        ("llama_4_scaling_beta", None),
        ("rope_theta", 1),
        ("partial_rotary_factor", 0.5),
        ("attention_factor", 1.5),
        ("truncate", False),
    ],
)
def test_a_key_of_the_rotation_is_refused_by_name(key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse({**TINY, "rope_parameters": {**ROPE, key: value}})


def test_a_key_that_no_rule_knows_is_named(caplog):
    with caplog.at_level("WARNING"):
        parse(TINY)
        assert not caplog.text
        parse({**TINY, "draft_heads": 2})
    assert "draft_heads=2" in caplog.text
