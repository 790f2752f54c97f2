"""Qwen3 as a text encoder against the goldens, in batches and buckets of every kind."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import text_encoders

from jdllm import errors
from jdllm.checkpoint import assemble, safetensors_source
from jdllm.models import loading
from jdllm.models.images import qwen3

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "goldens" / "images" / "z_image"
FOLDER = GOLDEN / "pipeline" / "text_encoder"
HF = json.loads((FOLDER / "config.json").read_text())
TOLERANCE = 5e-5  # of the goldens' README
PUBLISHED = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
}
NAMES = ("p0", "p1", "p2", "neg")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "text.npz") as file:
        return dict(file)


def load(hf):
    config = qwen3.COMPONENT.read(hf)
    graphdef, arrays = qwen3.COMPONENT.abstract(config, jnp.dtype(jnp.float32))
    source = safetensors_source.SafetensorsSource(FOLDER)
    fills = qwen3.COMPONENT.match(config, source.shapes)
    return graphdef, assemble.assemble(source, fills, arrays, show_progress=False)


@pytest.fixture(scope="module")
def encode():
    return text_encoders.compiled(*load(HF))


def ids_of(golden, name, bucket=512):
    return golden[f"{name}/ids{bucket}"][golden[f"{name}/mask{bucket}"] == 1]


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_single_prompts(golden, encode, name):
    ids = ids_of(golden, name)
    out = encode([ids], len(ids))
    np.testing.assert_allclose(out[0], golden[f"{name}/embeds"], atol=TOLERANCE)
    cut = ids_of(golden, name, 24)
    expected = golden[f"{name}/embeds"][: len(cut)]  # causal: what was cut came later
    np.testing.assert_allclose(encode([cut], 24)[0, : len(cut)], expected, atol=TOLERANCE)


def test_truncated_prompts(golden, encode):
    out = encode([ids_of(golden, "p2", 24)], 24)
    np.testing.assert_allclose(out[0], golden["p2/embeds_max24"], atol=TOLERANCE)


@pytest.mark.parametrize("bucket", [84, 100, 512])
def test_batches_equal_singles_in_any_bucket(golden, encode, bucket):
    rows = [ids_of(golden, name) for name in NAMES]
    out = encode(rows, bucket)
    assert out.shape == (4, bucket, HF["hidden_size"])
    for name, ids, embedded in zip(NAMES, rows, out, strict=True):
        np.testing.assert_allclose(
            embedded[: len(ids)], golden[f"{name}/embeds"], atol=TOLERANCE, err_msg=name
        )
        assert not embedded[len(ids) :].any()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_output_is_that_of_the_layer_before_the_last(golden, depth):
    config = qwen3.COMPONENT.read(HF | {"num_hidden_layers": depth + 1})
    graphdef, arrays = qwen3.COMPONENT.abstract(config, jnp.dtype(jnp.float32))
    _, params = load(HF)
    ids = ids_of(golden, "p1")
    encoder = loading.merge(graphdef, {path: params[path] for path in arrays})
    out = encoder.encode(jnp.asarray(ids)[None], jnp.asarray([len(ids)]))
    expected = golden[f"p1/hidden_states/{depth}"]
    np.testing.assert_allclose(out[0], expected, atol=TOLERANCE)


# Only these buckets and numbers of rows, so that few programs are compiled.
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([16, 40]),
    st.lists(st.integers(0, 16), min_size=3, max_size=3),
    st.integers(0, 2**31),
)
def test_rows_are_independent_of_neighbours_and_buckets(encode, bucket, lengths, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, HF["vocab_size"], length) for length in lengths]
    out = encode(rows, bucket)
    for row, embedded in zip(rows, out, strict=True):
        alone = encode([row], 16)[0]
        np.testing.assert_allclose(embedded[:16], alone, atol=TOLERANCE)
        assert not embedded[len(row) :].any()


def test_published_sizes():
    config = qwen3.COMPONENT.read(HF | PUBLISHED)
    _, arrays = qwen3.COMPONENT.abstract(config, jnp.dtype(jnp.bfloat16))
    # 4,022,468,096 parameters, less the last of 36 layers and the final norm.
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    count = sum(array.size for array in arrays.values())
    assert count == 4_022_468_096 - layer - 2560
    assert {array.dtype for array in arrays.values()} == {jnp.dtype(jnp.bfloat16)}
    assert not any("layers.35" in path or path == "norm.weight" for path in arrays)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("has_head", [False, True])
def test_names_may_have_the_prefix_of_the_causal_model(prefix, has_head):
    config = qwen3.COMPONENT.read(HF)
    stored = safetensors_source.SafetensorsSource(FOLDER).shapes
    names = {prefix + name.removeprefix("model."): shape for name, shape in stored.items()}
    if has_head:
        names["lm_head.weight"] = (572, 64)
    fills = qwen3.COMPONENT.match(config, names)
    used = {fill.tensor for parts in fills.values() for fill in parts}
    unused = {name.removeprefix(prefix) for name in names.keys() - used}
    assert unused == {
        name
        for name in map(lambda n: n.removeprefix(prefix), names)
        if (name.startswith("layers.2.") or name in ("norm.weight", "lm_head.weight"))
    }


def test_tensors_that_do_not_fit_are_reported_together():
    config = qwen3.COMPONENT.read(HF)
    shapes = dict(safetensors_source.SafetensorsSource(FOLDER).shapes)
    del shapes["model.layers.1.self_attn.k_norm.weight"]
    shapes["model.layers.0.self_attn.q_proj.bias"] = (96,)
    shapes["model.layers.0.mlp.up_proj.weight"] = (127, 64)
    shapes["embed_tokens.weight"] = (572, 64)
    with pytest.raises(errors.ConfigError) as error:
        qwen3.COMPONENT.match(config, shapes)
    for part in ("layers.1.self_attn.k_norm", "q_proj.bias", "[127, 64]", "by model.embed_tokens"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1000000, "type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None},
    ],
)
def test_places_of_the_rotary_base(rope):
    bare = {key: value for key, value in HF.items() if not key.startswith("rope")}
    assert qwen3.COMPONENT.read(bare | rope).attention.rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type='linear'"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling.factor=2"),
        ({"rope_scaling": 3}, "rope_scaling=3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type='yarn'"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta=1e.06 and .*rope_theta=1.* disagree",
        ),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_causal": False}, "is_causal=False"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_configs_that_cannot_be_served_name_the_key(changes, message):
    with pytest.raises(errors.ConfigError, match=f"config.json: {message}"):
        qwen3.COMPONENT.read(HF | changes)


def test_head_dim_is_not_what_divides_the_hidden_size():
    config = qwen3.COMPONENT.read({key: HF[key] for key in HF if key != "head_dim"})
    assert config.attention.head_dim == 128  # of the model class
