"""Qwen2.5-VL as a text encoder against the goldens, in batches and buckets of every kind."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_qwen_image as golden
from support import text_encoders

from jdllm import errors
from jdllm.models.images import qwen25_vl

TOLERANCE = 5e-5  # of the goldens' README
NAMES = ("p0", "p1", "p2", "neg")
HF = golden.config("text_encoder")
TOP = {key: value for key, value in HF.items() if key != "text_config"}
PUBLISHED = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}


@pytest.fixture(scope="module")
def encode():
    return text_encoders.compiled(*golden.params(qwen25_vl.COMPONENT, "text_encoder"))


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_single_prompts(encode, name):
    found = golden.arrays("text")
    out = encode([found[f"{name}/ids"]], 128)[0]
    expected = found[f"{name}/embeds"]
    own = out[golden.PREFIX : len(found[f"{name}/ids"])]
    np.testing.assert_allclose(own, expected, atol=TOLERANCE)


@pytest.mark.parametrize("bucket", [115, 128])
def test_batches_equal_singles_in_any_bucket(encode, bucket):
    found = golden.arrays("text")
    rows = [found[f"{name}/ids"] for name in NAMES]
    out = encode(rows, bucket)
    assert out.shape == (4, bucket, HF["hidden_size"])
    for name, ids, embedded in zip(NAMES, rows, out, strict=True):
        own = embedded[golden.PREFIX : len(ids)]
        np.testing.assert_allclose(own, found[f"{name}/embeds"], atol=TOLERANCE)
        assert not embedded[len(ids) :].any()


def test_a_cut_prompt_has_the_first_embeddings(encode):
    found = golden.arrays("text")
    end = golden.PREFIX + 16
    out = encode([found["p2/ids"][:end]], 128)[0, golden.PREFIX : end]
    np.testing.assert_allclose(out, found["p2/embeds_max16"], atol=TOLERANCE)


def test_the_output_is_that_of_the_last_layer_after_the_norm(encode):
    found = golden.arrays("text")
    ids = found["p1/ids"]
    out = encode([ids], 128)[0, : len(ids)]
    np.testing.assert_allclose(out, found["p1/hidden_states/3"], atol=TOLERANCE)


def test_rows_of_any_length_are_independent(encode):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, HF["vocab_size"], length) for length in (0, 1, 63, 128)]
    out = encode(rows, 128)
    for row, embedded in zip(rows, out, strict=True):
        np.testing.assert_allclose(embedded, encode([row], 128)[0], atol=TOLERANCE)
        assert not embedded[len(row) :].any()


def test_published_sizes():
    config = qwen25_vl.COMPONENT.read(TOP | PUBLISHED)
    _, arrays = qwen25_vl.COMPONENT.abstract(config, jnp.dtype(jnp.bfloat16))
    assert sum(array.size for array in arrays.values()) == 7_070_619_136
    assert config.attention.rope.rotary_dim == 128


@pytest.mark.parametrize(
    ("language", "others"),
    [("model.", ""), ("model.language_model.", "model.")],
    ids=["transformers 4", "transformers 5"],
)
def test_names_of_both_transformers(language, others):
    stored = golden.shapes("text_encoder")
    names = {
        language + name.removeprefix("model.") if name.startswith("model.") else others + name: s
        for name, s in stored.items()
    }
    config = qwen25_vl.COMPONENT.read(HF)
    fills = qwen25_vl.COMPONENT.match(config, names)
    used = {fill.tensor for parts in fills.values() for fill in parts}
    assert used == {name for name in names if name.startswith(language)}
    assert {name.removeprefix(others).split(".")[0] for name in names.keys() - used} == {
        "visual",
        "lm_head",
    }


def test_the_config_may_have_an_object_of_its_own():
    bare = {key: HF[key] for key in ("architectures", "model_type", "vision_config")}
    expected = qwen25_vl.COMPONENT.read(HF)
    assert qwen25_vl.COMPONENT.read(TOP) == expected
    inner = {"text_config": HF["text_config"]}
    assert qwen25_vl.COMPONENT.read(bare | inner) == expected
    new = {key: v for key, v in HF["text_config"].items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    assert qwen25_vl.COMPONENT.read(bare | {"text_config": new}) == expected


BAD = {
    "hidden_act": ("gelu", "hidden_act='gelu'"),
    "use_sliding_window": (True, "use_sliding_window=True"),
    "num_key_value_heads": (3, "no multiple of num_key_value_heads=3"),
    "hidden_size": (66, "hidden_size=66"),
    "text_config": ("x", "text_config='x' must be an object"),
    "rope_scaling": ({"type": "yarn"}, "rope_scaling.type='yarn'"),
    "rope_scaling.": ({"type": "mrope", "mrope_section": [2, 2]}, r"mrope_section=\[2, 2\]"),
    "rope_scaling..": ({"type": "mrope", "factor": 2.0}, "rope_scaling.factor=2.0"),
    "model_type": ("qwen2_vl", "model_type='qwen2_vl'"),
    "vocab_size": (None, "vocab_size is missing"),
}


@pytest.mark.parametrize("key", BAD)
def test_what_cannot_be_served_is_named(key):
    value, message = BAD[key]
    with pytest.raises(errors.ConfigError, match=message):
        qwen25_vl.COMPONENT.read({**TOP, key.rstrip("."): value})
