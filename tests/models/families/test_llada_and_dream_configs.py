"""Every config key of LLaDA and Dream is honoured or refused by name."""

import json
import logging
import math
import pathlib

import pytest
import transformers

from jdllm import errors, spec
from jdllm.models import registry

GOLDENS = pathlib.Path(__file__).parents[2] / "data" / "goldens"
TINY = {
    family: json.loads((GOLDENS / family / "config.json").read_text())
    for family in ("llada", "dream")
}
# The sizes of the published checkpoints (their config.json, and the sizes of their files).
LLADA_8B = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
}
DREAM_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "mask_token_id": 151666,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "pad_token_id": 151643,
}
PUBLISHED = {"llada": LLADA_8B, "dream": DREAM_7B}

every_family = pytest.mark.parametrize("family", TINY)


def parse(family, changes=None, drop=(), **options):
    hf = {key: value for key, value in TINY[family].items() if key not in drop} | (changes or {})
    return registry.family(registry.architecture_of(hf)).parse_config(hf, **options)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("family", "tensors", "parameters", "alignment"),
    [
        ("llada", 291, 8.015e9, spec.LogitAlignment.SAME_POSITION),
        ("dream", 339, 7.616e9, spec.LogitAlignment.SHIFTED),
    ],
)
def test_published_sizes_have_the_published_tensors(family, tensors, parameters, alignment, caplog):
    config = parse(family, PUBLISHED[family])
    assert not warnings_of(caplog)
    rows = registry.family(config.spec.architecture).weight_rows(config)
    assert len(rows) == tensors
    assert sum(math.prod(row.shape) for row in rows) == pytest.approx(parameters, rel=1e-3)
    assert (config.spec.head_dim, config.spec.rotary_dim) == (128, 128)
    assert config.spec.moe is None
    diffusion = config.spec.diffusion
    assert diffusion.attention_pattern is spec.AttentionPattern.FULL
    assert diffusion.logit_alignment is alignment
    assert diffusion.block_size == 32
    assert diffusion.mask_token_id == PUBLISHED[family]["mask_token_id"]
    assert diffusion.eos_token_ids == (PUBLISHED[family]["eos_token_id"],)
    assert diffusion.end_of_text_id == PUBLISHED[family]["pad_token_id"]


@every_family
@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"pad_token_id": 7, "eos_token_id": 9}, {"eos_token_id": [8, 7]}, 7),
        ({"pad_token_id": 7, "eos_token_id": 9}, {"eos_token_id": [8], "pad_token_id": 5}, 5),
        ({"pad_token_id": None, "eos_token_id": [6, 8]}, {}, 6),
        ({"pad_token_id": 3, "mask_token_id": 3, "eos_token_id": 9}, {}, 9),
    ],
)
def test_the_end_of_text_is_what_rows_are_padded_with(family, config, generation, expected):
    parsed = parse(family, config, generation_config=generation)
    assert parsed.spec.diffusion.end_of_text_id == expected


@every_family
def test_missing_ids_are_those_of_the_published_tokenizer(family):
    config = parse(family, PUBLISHED[family])
    ids = {"mask_token_id", "eos_token_id"}
    sizes = {key: value for key, value in PUBLISHED[family].items() if key not in ids}
    assert parse(family, sizes, drop=ids).spec.diffusion == config.spec.diffusion
    with pytest.raises(errors.ConfigError, match="mask_token_id=.*vocabulary of 256"):
        parse(family, drop=ids)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llada", "block_type", "sequential"),
        ("llada", "block_group_size", 4),
        ("llada", "layer_norm_type", "default"),
        ("llada", "layer_norm_with_affine", False),
        ("llada", "bias_for_layer_norm", True),
        ("llada", "attention_layer_norm", True),
        ("llada", "activation_type", "gelu"),
        ("llada", "include_bias", True),
        ("llada", "rope", False),
        ("llada", "rope_full_precision", False),
        ("llada", "alibi", True),
        ("llada", "input_emb_norm", True),
        ("llada", "scale_logits", True),
        ("llada", "multi_query_attention", True),
        ("llada", "clip_qkv", 8.0),
        ("llada", "sliding_window", 512),
        ("llada", "embedding_size", 320),
        ("llada", "n_kv_heads", 3),
        ("llada", "d_model", 66),
        ("llada", "d_model", 68),
        ("llada", "include_qkv_bias", "no"),
        ("llada", "weight_tying", 1),
        ("llada", "max_sequence_length", 0),
        ("dream", "hidden_act", "gelu"),
        ("dream", "use_sliding_window", True),
        ("dream", "attention_bias", False),
        ("dream", "num_key_value_heads", 3),
        ("dream", "hidden_size", 66),
        ("dream", "tie_word_embeddings", "false"),
        ("dream", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        *(
            (family, key, value)
            for family in TINY
            for key, value in (
                ("head_dim", 32),
                ("rope_scaling", {"type": "yarn", "factor": 4}),
                ("rope_parameters", {"rope_type": "yarn"}),
                ("partial_rotary_factor", 0.5),
                ("rope_parameters", {"partial_rotary_factor": 0.5}),
                ("quantization_config", {"bits": 8}),
                ("use_qk_norm", True),
                ("num_experts", 8),
                ("mlp_bias", True),
                ("logit_scale", 0.5),
                ("vocab_size", "many"),
                ("mask_token_id", 256),
                ("eos_token_id", [241, -1]),
                ("eos_token_id", []),
                ("pad_token_id", 256),
                ("block_size", 0),
            )
        ),
    ],
)
def test_unsupported_values_are_refused_by_name(family, key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse(family, {key: value})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llada", "d_model"),
        ("llada", "n_heads"),
        ("llada", "max_sequence_length"),
        ("dream", "hidden_size"),
        ("dream", "intermediate_size"),
        ("dream", "max_position_embeddings"),
        *((family, key) for family in TINY for key in ("rms_norm_eps", "rope_theta")),
    ],
)
def test_missing_keys_are_named(family, key):
    with pytest.raises(errors.ConfigError, match=f"{key} is missing"):
        parse(family, drop=(key,))


def test_missing_kv_heads_mean_one_for_each_query_head():
    assert parse("llada", {"n_kv_heads": None}).spec.num_kv_heads == 4
    assert parse("dream", drop=("num_key_value_heads",)).spec.num_kv_heads == 4


@pytest.mark.parametrize("key", ["block_type", "layer_norm_type", "activation_type", "rope"])
def test_a_missing_key_of_llada_means_what_its_model_class_takes_it_for(key):
    # Not the releases' value: the class's own defaults are GPT-2's.
    with pytest.raises(errors.ConfigError, match=f"{key}="):
        parse("llada", drop=(key,))


def test_llada_s_width_and_tying_have_the_defaults_of_its_model_class():
    config = parse("llada", drop=("mlp_hidden_size", "weight_tying"))
    assert config.layers[0].feed_forward.width == 4 * 64
    assert config.tie_word_embeddings


@every_family
def test_block_and_ids_come_from_the_checkpoint_before_the_family(family):
    assert parse(family).spec.diffusion.block_size == 32
    assert parse(family, {"block_length": 16}).spec.diffusion.block_size == 16
    assert parse(family, {"block_size": 16}, block_size=8).spec.diffusion.block_size == 8
    generation = {"eos_token_id": [241, 242], "mask_token_id": 7}
    diffusion = parse(family, drop=("mask_token_id",), generation_config=generation).spec.diffusion
    assert (diffusion.eos_token_ids, diffusion.mask_token_id) == ((241, 242), 7)


@every_family
def test_rope_theta_may_sit_in_rope_parameters(family):
    config = parse(family, {"rope_parameters": {"rope_theta": 5000.0}}, drop=("rope_theta",))
    assert {layer.attention.rope.theta for layer in config.layers} == {5000.0}


@every_family
def test_configs_that_transformers_wrote_give_no_warning(family, caplog):
    written = transformers.PretrainedConfig().to_dict() | {"_name_or_path": "x/y", "wobble": None}
    changes = {key: value for key, value in written.items() if key not in TINY[family]}
    parse(family, changes)
    assert not warnings_of(caplog)
    parse(family, {"wobble": 3})
    (message,) = warnings_of(caplog)
    assert "wobble=3" in message
