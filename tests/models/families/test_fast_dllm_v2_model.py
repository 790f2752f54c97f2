"""Fast-dLLM v2 against stored logits of the reference, and its configs."""

import json
import math
import pathlib

import numpy as np
import pytest
from support import fast_dllm_oracle

from jdllm import errors, spec
from jdllm.models import registry
from jdllm.runner import full_forward

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "data" / "goldens" / "fast_dllm_v2"
ATOL, RTOL = 2e-4, 1e-4  # the goldens' tolerance for float32 logits
TINY = json.loads((FOLDER / "config.json").read_text())


def parse(config, **options):
    return registry.family(registry.architecture_of(config)).parse_config(config, **options)


def test_logits_are_the_reference_s_as_the_head_gives_them():
    ids, expected = (np.load(FOLDER / f"{name}.npy") for name in ("inputs", "logits"))
    full = full_forward.load_model(FOLDER, dtype="float32")
    np.testing.assert_allclose(full.logits(ids.tolist()), expected, atol=ATOL, rtol=RTOL)
    oracle = fast_dllm_oracle.Model(FOLDER)
    for row, logits in zip(ids, expected, strict=True):
        found = oracle.forward(row, 0, oracle.no_kv())[0]
        np.testing.assert_allclose(found, logits, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("fast-dllm-v2-1.5b", 338, 1.544e9), ("fast-dllm-v2-7b", 339, 7.616e9)],
)
def test_published_sizes_have_the_published_tensors(name, tensors, parameters):
    config = parse(json.loads((ROOT / "configs" / name / "config.json").read_text()))
    rows = registry.family(config.spec.architecture).weight_rows(config)
    assert len(rows) == tensors
    assert sum(math.prod(row.shape) for row in rows) == pytest.approx(parameters, rel=1e-3)
    diffusion = config.spec.diffusion
    assert diffusion.attention_pattern is spec.AttentionPattern.BLOCK_CAUSAL
    assert diffusion.logit_alignment is spec.LogitAlignment.SHIFTED
    assert (diffusion.block_size, diffusion.mask_token_id) == (32, 151665)
    assert diffusion.eos_token_ids == (151645,)


def test_the_block_size_is_that_of_the_config_unless_the_caller_has_another():
    assert parse(TINY).spec.diffusion.block_size == 16
    assert parse(TINY, block_size=8).spec.diffusion.block_size == 8
    left = {key: value for key, value in TINY.items() if key != "bd_size"}
    assert parse(left).spec.diffusion.block_size == 32
    assert parse({**TINY, "block_size": 16}).spec.diffusion.block_size == 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 32),  # bd_size says 16
        ("bd_size", 0),
        ("bd_size", "16"),
        ("mask_token_id", 256),
        ("eos_token_id", -1),
        ("attention_bias", False),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention"] * 3),
        ("num_experts", 8),
        ("num_key_value_heads", 3),
        ("use_qk_norm", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_contradicting_key_is_refused_by_name(key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse({**TINY, key: value})


def test_a_key_that_no_rule_knows_is_named(caplog):
    with caplog.at_level("WARNING"):
        parse(TINY)
        assert not caplog.text
        parse({**TINY, "logit_scaling_of_blocks": 2.0})
    assert "logit_scaling_of_blocks=2.0" in caplog.text
