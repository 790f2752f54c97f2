"""CLIP and T5 as text encoders against the goldens, and rows of batches against rows alone."""

from __future__ import annotations

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_flux as golden

from jdllm import errors
from jdllm.models import loading
from jdllm.models.images import clip_text, t5

FULL_SIZE = pathlib.Path(__file__).parents[3] / "configs" / "flux-1-dev"
NAMES = ("p0", "p1", "p2", "neg")
ATOL = 5e-5  # of the goldens' README
PARAMETERS = {"text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656}
COMPONENTS = {"text_encoder": clip_text.COMPONENT, "text_encoder_2": t5.COMPONENT}


@functools.cache
def compiled(name, method="encode"):
    graphdef, params = golden.loaded(name)

    @jax.jit
    def run(*inputs):
        return getattr(loading.merge(graphdef, params), method)(*inputs)

    return run


def clip(ids, method="encode"):
    return compiled("text_encoder", method)(jnp.asarray(ids))


def embed(rows, bucket, method="encode"):
    """Returns T5's result for rows of ids; 7 stands past them."""
    ids = np.full((len(rows), bucket), 7, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    lens = jnp.asarray([len(row) for row in rows], jnp.int32)
    return compiled("text_encoder_2", method)(jnp.asarray(ids), lens)


def close(actual, expected, atol=ATOL):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=atol)


def test_vectors_of_prompts_alone_and_together():
    text = golden.arrays("text")
    ids = np.stack([text[f"{name}/clip_ids"] for name in NAMES])
    together = clip(ids)
    for i, name in enumerate(NAMES):
        close(together[i], text[f"{name}/pooled"])
        close(clip(ids[i : i + 1])[0], text[f"{name}/pooled"])


def test_states_of_clip():
    text = golden.arrays("text")
    states = clip(text["p1/clip_ids"][None], "hidden_states")
    assert len(states) == 3
    for i in (1, 2):
        close(states[i][0], text[f"p1/clip_hidden_states/{i}"])


@pytest.mark.parametrize("eos", [2, 757])
def test_the_first_end_token_counts_whether_the_config_names_it_or_not(eos):
    """Pads are end tokens, too, and the largest id."""
    graphdef, params = golden.loaded("text_encoder")
    config = clip_text.COMPONENT.read(golden.config_json("text_encoder") | {"eos_token_id": eos})
    graphdef = clip_text.COMPONENT.abstract(config, jnp.dtype(jnp.float32))[0]
    text = golden.arrays("text")
    ids = text["p1/clip_ids"]
    assert (ids == ids.max()).sum() > 2
    close(loading.merge(graphdef, params).encode(ids[None])[0], text["p1/pooled"])


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_padded_prompts(name):
    text = golden.arrays("text")
    close(embed([text[f"{name}/t5_ids64"]], 64)[0], text[f"{name}/t5_embeds"])


def test_states_of_t5():
    text = golden.arrays("text")
    states = embed([text["p1/t5_ids64"]], 64, "hidden_states")
    assert len(states) == 3
    for i in (0, 1):  # the last one of transformers is after the norm
        close(states[i][0], text[f"p1/t5_hidden_states/{i}"])
    close(embed([text["p1/t5_ids64"]], 64)[0], text["p1/t5_hidden_states/2"])


def test_the_length_of_a_prompt_counts_and_that_of_the_bucket_does_not():
    text = golden.arrays("text")
    rows = [text["p1/t5_ids512"], text["p1/t5_ids64"], text["p2/t5_ids64"][:40]]
    out = embed(rows, 512)
    close(out[0], text["p1/t5_embeds512"])
    close(out[1, :64], text["p1/t5_embeds"])
    assert np.abs(out[0, :64] - out[1, :64]).max() > 0.5, "pads are attended"
    assert not np.asarray(out[1, 64:]).any() and not np.asarray(out[2, 40:]).any()
    close(out[2, :40], embed([rows[2]], 64)[0, :40])


def bucket_of(distance, num_buckets, max_distance):
    """The rule in words: half for each direction, of these half exact, the rest logarithmic."""
    half = num_buckets // 2
    exact, size = half // 2, abs(distance)
    begin = half if distance > 0 else 0
    if size < exact:
        return begin + size
    share = math.log(size / exact) / math.log(max_distance / exact)
    return begin + min(half - 1, exact + math.floor(share * (half - exact) + 1e-6))


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 20)])
def test_buckets_of_distances(num_buckets, max_distance):
    distances = np.arange(-600, 601).reshape(1, -1)
    found = t5.buckets(distances, num_buckets=num_buckets, max_distance=max_distance)
    expected = [bucket_of(int(one), num_buckets, max_distance) for one in distances[0]]
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_full_size_has_the_parameters_of_the_release(name):
    hf = json.loads((FULL_SIZE / name / "config.json").read_text())
    config = COMPONENTS[name].read(hf)
    arrays = COMPONENTS[name].abstract(config, jnp.dtype(jnp.bfloat16))[1]
    assert sum(math.prod(array.shape) for array in arrays.values()) == PARAMETERS[name]


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMPONENTS)
def test_bfloat16_is_near(name):
    graphdef, params = golden.loaded(name, "bfloat16")
    encoder = loading.merge(graphdef, params)
    text = golden.arrays("text")
    if name == "text_encoder":
        out, expected = encoder.encode(text["p2/clip_ids"][None]), text["p2/pooled"]
    else:
        out = encoder.encode(text["p2/t5_ids64"][None], jnp.array([64]))
        expected = text["p2/t5_embeds"]
    assert out.dtype == jnp.bfloat16
    close(out[0].astype(jnp.float32), expected, 0.15)  # the reference itself: up to 0.04


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_names_of_clip_with_and_without_prefix(prefix):
    config = clip_text.COMPONENT.read(golden.config_json("text_encoder"))
    shapes = {
        prefix + name.removeprefix("text_model."): array.shape
        for name, array in golden.tensors("text_encoder").items()
    }
    shapes[f"{prefix}embeddings.position_ids"] = (1, 77)
    fills = clip_text.COMPONENT.match(config, shapes)
    used = {fill.tensor for parts in fills.values() for fill in parts}
    assert shapes.keys() - used == {f"{prefix}embeddings.position_ids"}


def test_the_words_of_t5_may_stand_twice():
    config = t5.COMPONENT.read(golden.config_json("text_encoder_2"))
    shapes = {name: array.shape for name, array in golden.tensors("text_encoder_2").items()}
    shapes |= {"encoder.embed_tokens.weight": (218, 48), "decoder.final_layer_norm.weight": (48,)}
    t5.COMPONENT.match(config, shapes)
    with pytest.raises(errors.ConfigError, match="encoder.block.0.layer.2"):
        t5.COMPONENT.match(config, shapes | {"encoder.block.0.layer.2.weight": (48,)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("text_encoder", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("text_encoder", {"model_type": "clip"}, "model_type='clip'"),
        ("text_encoder", {"num_attention_heads": 3}, "hidden_size=32 is no multiple"),
        ("text_encoder", {"vocab_size": None}, "vocab_size is missing"),
        ("text_encoder", {"layer_norm_eps": 0}, "layer_norm_eps=0"),
        ("text_encoder", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("text_encoder_2", {"feed_forward_proj": "relu"}, "feed_forward_proj='relu'"),
        ("text_encoder_2", {"feed_forward_proj": None}, "feed_forward_proj=None"),
        ("text_encoder_2", {"dense_act_fn": "relu"}, "dense_act_fn='relu'"),
        ("text_encoder_2", {"model_type": "umt5"}, "model_type='umt5'"),
        ("text_encoder_2", {"relative_attention_num_buckets": 30}, "num_buckets=30 must be"),
        ("text_encoder_2", {"relative_attention_max_distance": 8}, "max_distance=8 larger"),
        ("text_encoder_2", {"d_kv": "16"}, "d_kv='16'"),
    ],
)
def test_configs_that_cannot_be_served_name_the_key(name, change, message):
    with pytest.raises(errors.ConfigError, match=f"config.json: .*{message}"):
        COMPONENTS[name].read(golden.config_json(name) | change)
