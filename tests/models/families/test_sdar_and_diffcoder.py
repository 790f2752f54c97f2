"""SDAR, SDAR-MoE and Stable-DiffCoder against stored outputs of references, and their configs."""

import functools
import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import errors, spec
from jdllm.layers import attention
from jdllm.models import loading, registry
from jdllm.runner import full_forward

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDENS = ROOT / "tests" / "data" / "goldens"
FAMILIES = ("sdar", "sdar_moe", "stable_diffcoder")
ATOL, RTOL = 2e-4, 1e-4  # the goldens' tolerance for float32 logits
BLOCK = 4

every_family = pytest.mark.parametrize("family", FAMILIES)


def golden(family, name):
    return np.load(GOLDENS / family / f"{name}.npy")


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=ATOL, rtol=RTOL)


@functools.cache
def hf(family):
    return json.loads((GOLDENS / family / "config.json").read_text())


def parse(config, **options):
    return registry.family(registry.architecture_of(config)).parse_config(config, **options)


@every_family
def test_logits_are_the_reference_s(family):
    length = golden(family, "inputs").shape[1]
    mask = attention.visibility_mask(length, BLOCK, "block_causal")
    assert mask.tolist() == golden(family, "attn_mask").tolist()
    full = full_forward.load_model(GOLDENS / family, dtype="float32")
    close(full.logits(golden(family, "inputs").tolist()), golden(family, "logits"))


def test_router_logits_and_chosen_experts_of_sdar_moe_are_the_reference_s():
    loaded = loading.load(GOLDENS / "sdar_moe", dtype="float32", show_progress=False)
    module = loading.merge(loaded.graphdef, loaded.params)
    ids = golden("sdar_moe", "inputs")
    rows, length = ids.shape
    positions = jnp.tile(jnp.arange(length), rows)
    angles = module.angles(positions)
    attend = attention.dense_attend(golden("sdar_moe", "attn_mask"), rows)
    x = module.embed(jnp.asarray(ids).reshape(-1), positions)
    expected = golden("sdar_moe", "router_logits")
    k = hf("sdar_moe")["num_experts_per_tok"]
    for i, layer in enumerate(module.layers):
        kind = angles[layer.attention.config.rope]
        out, _ = layer.attention(layer.input_layernorm(x), kind, attend=attend, cache=None)
        h = layer.post_attention_layernorm(x + sum(out))
        close(layer.mlp.router.logits(h), expected[i])
        chosen, weights = layer.mlp.router(h)
        np.testing.assert_array_equal(chosen, np.argsort(-expected[i], kind="stable")[:, :k])
        np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1.0, rtol=1e-5)
        x, pending, _ = layer(x, (), angles, attend=attend, cache=None)
        x = x + sum(pending)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("sdar-1.7b", 311, 2.03e9),
        ("sdar-4b", 399, 4.41e9),
        ("sdar-8b", 399, 8.19e9),
        ("sdar-30b-a3b", 18867, 30.53e9),
    ],
)
def test_published_sizes_have_the_published_tensors(name, tensors, parameters):
    config = parse(json.loads((ROOT / "configs" / name / "config.json").read_text()))
    rows = registry.family(config.spec.architecture).weight_rows(config)
    assert len(rows) == tensors
    total = sum(math.prod(row.shape) for row in rows)
    assert total == pytest.approx(parameters, rel=2e-3)
    diffusion = config.spec.diffusion
    assert diffusion.attention_pattern is spec.AttentionPattern.BLOCK_CAUSAL
    assert diffusion.logit_alignment is spec.LogitAlignment.SAME_POSITION
    assert (diffusion.block_size, diffusion.mask_token_id) == (4, 151669)


def test_stable_diffcoder_has_llama_s_tensors():
    sizes = {"num_hidden_layers": 32}
    config = parse({**hf("stable_diffcoder"), **sizes})
    rows = registry.family(config.spec.architecture).weight_rows(config)
    assert len(rows) == 291


@every_family
def test_what_the_published_configs_leave_out_is_known(family):
    # Ids beyond the tiny vocabulary are those of the published tokenizers.
    left = {k: v for k, v in hf(family).items() if k not in ("block_size", "mask_token_id")}
    diffusion = parse({**left, "vocab_size": 151936}).spec.diffusion
    mask = 5 if family == "stable_diffcoder" else 151669
    assert (diffusion.block_size, diffusion.mask_token_id) == (4, mask)
    assert parse(hf(family), block_size=16).spec.diffusion.block_size == 16


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("sdar", "attention_bias", True),
        ("sdar", "hidden_act", "gelu"),
        ("sdar", "use_sliding_window", True),
        ("sdar", "num_experts", 8),
        ("sdar", "num_key_value_heads", 3),
        ("sdar", "rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("sdar_moe", "num_experts_per_tok", 17),
        ("sdar_moe", "n_group", 2),
        ("sdar_moe", "shared_expert_intermediate_size", 64),
        ("sdar_moe", "norm_topk_prob", "yes"),
        ("sdar_moe", "decoder_sparse_step", 2),
        ("sdar_moe", "mlp_only_layers", [0]),
        ("sdar_moe", "scoring_func", "sigmoid"),
        ("stable_diffcoder", "attention_bias", True),
        ("stable_diffcoder", "mlp_bias", True),
        ("stable_diffcoder", "hidden_act", "gelu"),
    ],
)
def test_a_contradicting_key_is_refused_by_name(family, key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse({**hf(family), key: value})
