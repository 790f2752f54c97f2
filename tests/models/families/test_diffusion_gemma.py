"""DiffusionGemma against the reference's logits, and the configs that it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support.gemma_rows import CANVAS, GOLDEN, GemmaRows, heads_of_layers, load, weights_of_rank

from jdllm import errors
from jdllm.engine.start import weights_fit
from jdllm.models import loading, registry, split
from jdllm.runner import full_forward
from jdllm.spec import AttentionPattern
from jdllm.train import step

# Those of the goldens: float32 sums in another order; logits are of size 30.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
CONFIG = json.loads((GOLDEN / "config.json").read_text())
PUBLISHED = GOLDEN.parents[3] / "configs" / "diffusion-gemma-26b-a4b"


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def test_canvas_logits_equal_the_references_through_pages():
    prompts = load("prompt").tolist()
    rows = GemmaRows(2)
    rows.encode(prompts)  # longer than the window of the sliding layers
    first = rows.denoise(load("canvas1"))
    np.testing.assert_allclose(first, load("logits1"), **TOLERANCE)
    second = rows.denoise(load("canvas2"), rows.mix(load("logits1")))
    np.testing.assert_allclose(second, load("logits2"), **TOLERANCE)
    # The canvas left K,V behind the context, where the encoder now writes.
    rows.encode(load("canvas2").tolist())
    third = rows.denoise(load("canvas3"))
    np.testing.assert_allclose(third, load("logits3"), **TOLERANCE)


def test_a_context_encoded_in_parts_and_a_row_between_others_change_nothing():
    prompts, canvas = load("prompt").tolist(), load("canvas1")
    rows = GemmaRows(3, page_size=16)
    rows.encode([prompts[0][:5], [7, 8, 9], prompts[1][:8]])
    rows.encode([prompts[0][5:], [], prompts[1][8:]])
    logits = rows.denoise(np.stack([canvas[0], canvas[0], canvas[1]]))
    np.testing.assert_allclose(logits[::2], load("logits1"), **TOLERANCE)


def test_facts_of_the_config():
    spec = loading.read_spec(GOLDEN)
    diffusion = spec.diffusion
    assert (diffusion.block_size, diffusion.mask_token_id, diffusion.kind) == (8, None, "uniform")
    assert diffusion.attention_pattern is AttentionPattern.CAUSAL
    assert diffusion.eos_token_ids == (1,) and diffusion.end_of_text_id == 0
    assert [(one.count, one.dim) for one in spec.kv_heads] == [(2, 16), (1, 32)] * 2
    # K and V of two heads of 16, or of one of 32, are 64 numbers a layer.
    assert spec.kv_bytes_per_token(4) == 4 * 64 * 4
    with pytest.raises(errors.ConfigError, match="mask_token_id=5 is not supported"):
        parse({"mask_token_id": 5})


def parse(changes=(), text=(), **kwargs):
    family = registry.family("DiffusionGemmaForBlockDiffusion")
    return family.parse_config(
        CONFIG | dict(changes) | {"text_config": CONFIG["text_config"] | dict(text)}, **kwargs
    )


def test_sizes_of_full_layers_have_two_spellings_that_agree():
    one = parse()
    other = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
    assert parse(text=other) == one
    assert (
        parse(text={**other, "per_layer_config": CONFIG["text_config"]["per_layer_config"]}) == one
    )
    assert parse(block_size=4).spec.diffusion.block_size == 4


@pytest.mark.parametrize(
    "changes, text, message",
    [
        ({}, {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
        ({"vocab_size": 99}, {}, "vocab_size=99 and text_config.vocab_size=256 disagree"),
        ({"text_config": 3}, None, "text_config=3 must be an object"),
        ({}, {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries"),
        ({}, {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({}, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ({}, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
        ({}, {"attention_k_eq_v": False}, "attention_k_eq_v=False"),
        ({}, {"rope_theta": 1e4}, "rope_theta"),
        ({}, {"rope_parameters": {"chunked": {}}}, "rope_parameters.chunked"),
        (
            {},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "factor": 8}}},
            "rope_parameters.full_attention.factor=8",
        ),
        (
            {},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "yarn"}}},
            "rope_parameters.full_attention.rope_type='yarn'",
        ),
        ({}, {"per_layer_config": {"9": {}}}, "per_layer_config.9"),
        ({}, {"per_layer_config": {"1": {"window": 3}}}, "per_layer_config.1.window=3"),
        ({}, {"per_layer_config": {"1": {"head_dim": 7}}}, "the width must be even"),
        ({}, {"global_head_dim": 64}, "head_dim=32 and global_head_dim=64 disagree"),
        ({}, {"final_logit_softcapping": 0}, "final_logit_softcapping=0"),
        ({}, {"sliding_window": None}, "sliding_window is missing"),
        ({}, {"top_k_experts": 9}, "exceeds the 8 experts"),
        ({}, {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, text, message):
    with pytest.raises(errors.ConfigError, match=message):
        if text is None:
            registry.family("DiffusionGemmaForBlockDiffusion").parse_config(CONFIG | changes)
        parse(changes, text)


def test_what_needs_logits_of_whole_sequences_refuses_the_family_by_name():
    with pytest.raises(errors.ConfigError, match="no logits of a whole sequence"):
        full_forward.load_model(GOLDEN)
    with pytest.raises(errors.ConfigError, match="DiffusionGemmaForBlockDiffusion: training needs"):
        step.build_network(CONFIG, "float32")
    with pytest.raises(ValueError, match="softcap=30.0 are not streamed"):
        GemmaRows(1).model.unembedding().stats(np.zeros((1, 64), np.float32))


def test_tensors_that_nobody_knows_are_refused_and_those_of_vision_are_not_read(tmp_path):
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    tensors["model.decoder.layers.0.self_attn.v_norm.weight"] = np.ones(16, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(errors.ConfigError, match=r"1 tensors unexpected:\s+.*v_norm") as refused:
        loading.load(tmp_path)
    assert "vision" not in str(refused.value)


def test_the_published_sizes_have_the_parameters_of_the_published_files():
    config = loading.read_config(PUBLISHED)
    family = registry.family(config.spec.architecture)
    shapes = family.shapes(config)
    count = sum(int(np.prod(one.shape)) for one in shapes.values())
    assert round(count / 1e9, 3) == 25.251  # without the vision tower
    assert config.spec.diffusion.block_size == 256 and CANVAS == 8
    full = [i for i, one in enumerate(config.layers) if one.attention.window is None]
    assert full == [5, 11, 17, 23, 29]
    # K,V of a token in bfloat16, as the design's table of floors has it.
    assert config.spec.kv_bytes_per_token(2) == 225280


@pytest.mark.parametrize("ep", [1, None])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_rank_holds_its_share_of_the_published_weights_and_heads(tp, ep):
    text = json.loads((PUBLISHED / "config.json").read_text())["text_config"]
    config = loading.read_config(PUBLISHED)
    shards = split.shards_of(config, tp, ep)
    numbers, exact = weights_of_rank(text, tp)
    found = weights_fit.bytes_of_rank(config, shards, jnp.dtype(jnp.bfloat16))
    assert found == 2 * numbers + 4 * exact
    local = split.local_config(config, shards).spec
    expected = [(max(heads // tp, 1), dim) for heads, dim, _ in heads_of_layers(text)]
    assert [(one.count, one.dim) for one in local.kv_heads] == expected


def test_sizes_that_cannot_be_split_are_refused_with_what_would_work():
    with pytest.raises(errors.ConfigError, match="4 query heads .* 8; use tp_size 1, 2, 4$"):
        split.shards_of(parse(), 8, None)
    for key, value, message in (
        ("intermediate_size", 50, "dense feed-forwards' width 50 .* 4; use tp_size 1, 2$"),
        ("moe_intermediate_size", 18, "the experts' width 18 cannot be divided by 4"),
        ("num_experts", 6, "6 experts .* use tp_size 1, 2, 4 with ep_size=1$"),
    ):
        ep = 1 if key == "moe_intermediate_size" else None
        with pytest.raises(errors.ConfigError, match=message):
            split.shards_of(parse(text={key: value}), 4, ep)
