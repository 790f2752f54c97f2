"""LLaDA-MoE against a numpy forward of the published description; no stored reference exists."""

import json
import math
import pathlib

import numpy as np
import pytest
import safetensors.numpy
from support import llada_moe

from jdllm import errors, spec
from jdllm.models import loading, registry
from jdllm.runner import full_forward

ROOT = pathlib.Path(__file__).resolve().parents[3]
ARCHITECTURE = "LLaDAMoEModelLM"


def parse(**changes):
    return registry.family(ARCHITECTURE).parse_config(llada_moe.CONFIG | changes)


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_the_numpy_forward(seed, tmp_path):
    tensors = llada_moe.random_tensors(seed)
    ids = np.random.default_rng(seed).integers(0, llada_moe.VOCAB, (2, 11))
    full = full_forward.load_model(llada_moe.write(tmp_path, tensors), dtype="float32")
    expected = np.stack([llada_moe.logits(row, tensors) for row in ids])
    assert np.abs(expected).max() > 3, "the comparison means something"
    np.testing.assert_allclose(full.logits(ids), expected, atol=2e-4, rtol=1e-4)


def test_export_is_the_reverse_of_loading(tmp_path):
    tensors = llada_moe.random_tensors()
    loaded = loading.load(llada_moe.write(tmp_path, tensors), dtype="float32", show_progress=False)
    path = tmp_path / "out.safetensors"
    loading.export_safetensors(ARCHITECTURE, loaded.config, loaded.params, path)
    written = safetensors.numpy.load_file(path)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


def test_the_published_size():
    hf = json.loads((ROOT / "configs/llada-moe-7b-a1b/config.json").read_text())
    family = registry.family(registry.architecture_of(hf))
    config = family.parse_config(hf)
    total = sum(math.prod(row.shape) for row in family.weight_rows(config))
    assert total == pytest.approx(7.36e9, rel=5e-3)  # its name says 7B
    diffusion = config.spec.diffusion
    assert diffusion.attention_pattern is spec.AttentionPattern.FULL
    assert diffusion.logit_alignment is spec.LogitAlignment.SAME_POSITION
    assert (diffusion.mask_token_id, diffusion.eos_token_ids) == (156895, (156892,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_layernorm", False),
        ("qk_layernorm", None),
        ("norm_topk_prob", True),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("moe_layer_freq", [1, 0]),
        ("shared_expert_intermediate_size", 32),
        ("router_num_group", 4),
        ("routed_scaling_factor", 2.5),
        ("num_experts_per_tok", 7),
        ("attention_bias", True),
        ("partial_rotary_factor", 0.5),
        ("head_dim", 7),
    ],
)
def test_a_contradicting_key_is_refused_by_name(key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse(**{key: value})


def test_the_norms_of_q_and_k_must_be_stated():
    hf = {key: value for key, value in llada_moe.CONFIG.items() if key != "qk_layernorm"}
    with pytest.raises(errors.ConfigError, match="qk_layernorm"):
        registry.family(ARCHITECTURE).parse_config(hf)
