"""Every config key is honoured or refused by name."""

import json
import logging
import pathlib

import pytest
import transformers

from jdllm import errors
from jdllm.models import registry
from jdllm.models.families import llada2

ROOT = pathlib.Path(__file__).parents[3]
TINY = json.loads((ROOT / "tests/data/goldens/llada2/config.json").read_text())


def parse(changes=None, drop=(), **options):
    hf = {key: value for key, value in TINY.items() if key not in drop} | (changes or {})
    return llada2.FAMILY.parse_config(hf, **options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Published sizes: 16B and 100B, embeddings and routers included.
    [
        ("llada2.0-mini", 16.3e9),
        ("llada2.1-mini", 16.3e9),
        ("llada2.0-flash", 102.9e9),
        ("llada2.2-flash", 102.9e9),
    ],
)
def test_shipped_configs_have_the_published_size(name, parameters):
    hf = json.loads((ROOT / "configs" / name / "config.json").read_text())
    family = registry.family(registry.architecture_of(hf))
    config = family.parse_config(hf, block_size=None)
    diffusion = config.spec.diffusion
    assert (diffusion.mask_token_id, diffusion.eos_token_ids) == (156895, (156892,))
    assert diffusion.block_size == 32
    total = sum(_size(row.shape) for row in family.weight_rows(config) if row.form in ("", "split"))
    assert total == pytest.approx(parameters, rel=0.01)


def test_tensor_count_of_mini_is_the_published_one():
    hf = json.loads((ROOT / "configs/llada2.0-mini/config.json").read_text())
    family = registry.family(registry.architecture_of(hf))
    rows = family.weight_rows(family.parse_config(hf, block_size=None))
    assert sum(row.form in ("", "split") for row in rows) == 14813


def _size(shape):
    total = 1
    for dim in shape:
        total *= dim
    return total


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", True),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_qk_norm", False),
        ("expert_capacity", 48),
        ("expert_capacity", 3),
        ("expert_capacity", "many"),
        ("delete_token_id", 310),
        ("split_token_id", 310),
        ("score_function", "softmax"),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("quantization_config", {"bits": 8}),
        ("hidden_act", "gelu"),
        ("norm_topk_prob", False),
        ("mask_token_id", 320),
        ("eos_token_id", [301, -1]),
        ("rotary_dim", 16),
        ("topk_group", 9),
        ("num_experts", 30),
        ("num_experts_per_tok", 17),
        ("num_key_value_heads", 3),
        ("vocab_size", "many"),
        ("block_size", 0),
        # Keys of other families that would change the forward pass.
        ("attention_bias", True),
        ("mlp_bias", True),
        ("logit_softcap", 30.0),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("moe_layer_freq", 2),
        ("mlp_only_layers", [0]),
        ("use_rmsnorm", False),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("num_nextn_predict_layers", 1),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("rope_parameters", {"type": "yarn"}),
        ("rope_interleave", True),
        ("tie_word_embeddings", "false"),
        ("norm_head", "no"),
    ],
)
def test_unsupported_values_are_refused_by_name(key, value):
    with pytest.raises(errors.ConfigError, match=key):
        parse({key: value})


LLADA22 = json.loads((ROOT / "tests/data/goldens/llada22/config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"block_size": 4}, "block_size=4 must be block_size=8 .*expert_capacity=8"),
        ({"expert_capacity": 33}, {}, "expert_capacity=33 must lie between"),
        ({"delete_token_id": 300}, {}, "delete_token_id=300, .* must differ"),
        ({"delete_token_id": 311}, {}, "delete_token_id=311, .* must differ"),
        ({"delete_token_id": 320}, {}, "delete_token_id=320 must be an integer from 0 to 319"),
        ({"split_token_id": True}, {}, "split_token_id=True must be an integer"),
        ({"split_token_id": 310.5}, {}, "split_token_id=310.5 must be an integer"),
        ({"split_token_id": None}, {}, "split_token_id is missing"),
    ],
)
def test_contradictions_of_llada22_are_refused_by_name(changes, options, message):
    with pytest.raises(errors.ConfigError, match=message):
        llada2.FAMILY.parse_config(LLADA22 | changes, **options)


def test_a_capacity_alone_switches_the_routing_of_blocks_on():
    routers = [
        llada2.FAMILY.parse_config(hf).layers[1].feed_forward.router
        for hf in (LLADA22, LLADA22 | {"expert_capacity": 0}, LLADA22 | {"expert_capacity": None})
    ]
    assert [(r.block_size, r.block_capacity, r.num_groups) for r in routers] == [
        (8, 8, 1), (0, 0, 8), (0, 0, 8)
    ]  # fmt: skip


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_unknown_keys_are_named_with_their_values_in_one_warning(caplog):
    parse({"wobble": 3, "attention_sinks": True, "rope_parameters": {"twist": 0.5}})
    (message,) = warnings_of(caplog)
    for part in ("wobble=3", "attention_sinks=True", "rope_parameters.twist=0.5"):
        assert part in message
    assert "hidden_size" not in message


@pytest.mark.parametrize(
    "path",
    [
        "configs/llada2.0-mini",
        "configs/llada2.0-flash",
        "configs/llada2.1-mini",
        "configs/llada2.2-flash",
        "tests/data/goldens/llada22",
        "tests/data/goldens/llada2",
        "jdllm/assets/jdllm-nano",
    ],
)
def test_configs_we_ship_give_no_warning(path, caplog):
    llada2.FAMILY.parse_config(json.loads((ROOT / path / "config.json").read_text()))
    assert not warnings_of(caplog)


def test_configs_that_transformers_wrote_give_no_warning(caplog):
    # What save_pretrained adds to a config, and neutral values of foreign keys.
    written = transformers.PretrainedConfig().to_dict() | {
        "_name_or_path": "x/y",
        "id2label": {"0": "LABEL_0"},
        "return_dict": True,
        "torchscript": False,
    }
    neutral = {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "use_rmsnorm": True,
        "logit_softcap": None,
        "num_nextn_predict_layers": 0,
        "layer_types": ["full_attention"] * 3,
        "wobble": None,
    }
    parse({key: value for key, value in written.items() if key not in TINY} | neutral)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "rope_theta", "num_experts"])
def test_missing_keys_are_named(key):
    with pytest.raises(errors.ConfigError, match=f"{key}.*"):
        parse(drop=(key,))


def test_missing_qk_norm_means_true_and_missing_groups_mean_none():
    config = parse(drop=("use_qk_norm", "n_group", "topk_group"))
    assert config.layers[-1].feed_forward.router.num_groups == 1


def test_rope_theta_may_sit_in_rope_parameters():
    config = parse({"rope_parameters": {"rope_theta": 5000.0}}, drop=("rope_theta",))
    assert {layer.attention.rope.theta for layer in config.layers} == {5000.0}


def test_block_and_ids_come_from_the_checkpoint_before_the_family():
    config = parse({"block_size": 16})
    assert config.spec.diffusion.block_size == 16
    assert parse({"block_length": 4}).spec.diffusion.block_size == 4
    assert parse({"block_size": 16}, block_size=8).spec.diffusion.block_size == 8
    with pytest.raises(errors.ConfigError, match="disagree"):
        parse({"block_size": 16, "block_length": 4})
    generation = {"eos_token_id": [301, 302]}
    config = parse(drop=("mask_token_id",), generation_config=generation | {"mask_token_id": 7})
    assert config.spec.diffusion.eos_token_ids == (301, 302)
    assert config.spec.diffusion.mask_token_id == 7


def test_family_default_ids_outside_a_small_vocabulary_are_refused():
    with pytest.raises(errors.ConfigError, match="mask_token_id=156895.*320"):
        parse(drop=("mask_token_id",))


@pytest.mark.parametrize("names", [None, [], ["GPT2LMHeadModel"]])
def test_unknown_architectures_list_the_supported_ones(names):
    with pytest.raises(errors.ConfigError, match="supported: LLaDA2MoeModelLM"):
        registry.architecture_of({"architectures": names})
    with pytest.raises(errors.ConfigError, match="supported: LLaDA2MoeModelLM"):
        registry.family("GPT2LMHeadModel")
