"""The transformer of Qwen-Image against diffusers 0.42.1, and its rows against themselves alone."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_qwen_image as golden
from support import marks

from jdllm import errors
from jdllm.models import loading
from jdllm.models.images import packing, qwen_image, qwen_image_config

TIMESTEPS = (1.0, 0.6, 0.05)
SIZES = {"10x10": (5, 5), "14x8": (7, 4)}  # latents, and the grid of their tokens
# Measured by the makers of the arrays: angles of 1000 rad differ by 1e-4 from one exp to another.
ATOL, ATOL_GIVEN_TIMESTEP, ATOL_BATCH = 1e-4, 3e-5, 5e-5
PUBLISHED = qwen_image_config.read({})  # the defaults of the class


@functools.cache
def module(dtype: str = "float32") -> qwen_image.QwenImageTransformer:
    return loading.merge(*golden.params(qwen_image.COMPONENT, "transformer", dtype))


@functools.cache
def compiled(grid, dtype: str = "float32"):
    model = module(dtype)
    return jax.jit(lambda *inputs: model(*inputs, grid))


def captions():
    return [golden.arrays("text")[f"p{j}/embeds"] for j in range(3)]


def padded(rows, bucket, fill):
    """Returns (captions [B, bucket, F], lengths)."""
    out = np.full((len(rows), bucket, rows[0].shape[1]), fill, np.float32)
    for row, caption in zip(out, rows):
        row[: len(caption)] = caption
    return jnp.asarray(out), jnp.asarray([len(row) for row in rows], jnp.int32)


def forward(x, sigma, rows, grid, *, bucket=96, fill=7.0, dtype="float32"):
    """`fill` stands where nothing may be read."""
    inputs = jnp.asarray(x), jnp.asarray(sigma, jnp.float32), *padded(rows, bucket, fill)
    return np.asarray(compiled(grid, dtype)(*inputs))


def close(actual, expected, atol):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("size", marks.every(2, SIZES))
@pytest.mark.parametrize("step", range(3))
def test_rows_alone(size, step):
    found = golden.arrays("transformer")
    for j, caption in enumerate(captions()):
        x = found[f"{size}/x"][j : j + 1]
        out = forward(x, TIMESTEPS[step : step + 1], [caption], SIZES[size])
        assert out.dtype == np.float32
        close(out[0], found[f"{size}/t{step}/p{j}"], ATOL)


@pytest.mark.parametrize("size", marks.every(2, SIZES))
@pytest.mark.parametrize("steps", [(1, 1, 1), (0, 1, 2), (2, 0, 1)])
def test_rows_of_unequal_captions_and_timesteps(size, steps):
    found = golden.arrays("transformer")
    sigma = [TIMESTEPS[i] for i in steps]
    out = forward(found[f"{size}/x"], sigma, captions(), SIZES[size])
    expected = np.stack([found[f"{size}/t{i}/p{j}"] for j, i in enumerate(steps)])
    close(out, expected, ATOL)


@pytest.mark.parametrize("seed", range(4))
def test_no_bucket_and_no_neighbour_changes_a_row(seed):
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(n, 64)).astype(np.float32) for n in rng.integers(1, 65, size=3)]
    x, sigma = rng.normal(size=(3, 25, 64)).astype(np.float32), rng.uniform(size=3)
    together = forward(x, sigma, rows, (5, 5), bucket=64, fill=-3.0)
    for i in range(3):
        one = slice(i, i + 1)
        close(together[i], forward(x[one], sigma[one], rows[one], (5, 5))[0], ATOL_BATCH)


def test_every_block_given_the_timestep():
    """The outputs inside one forward, with the reference's own embedding of the timestep."""
    taps, model = golden.arrays("transformer"), module()
    embedding = jnp.asarray(taps["tap/time_text_embed"])
    caption = jnp.asarray(golden.arrays("text")["p1/embeds"])[None]
    image = model.image_in(jnp.asarray(taps["10x10/x"][1:2]))
    close(image, taps["tap/img_in"], ATOL_GIVEN_TIMESTEP)
    close(model.text_norm(caption), taps["tap/txt_norm"], ATOL_GIVEN_TIMESTEP)
    text = model.embed_text(caption)
    close(text, taps["tap/txt_in"], ATOL_GIVEN_TIMESTEP)
    rotation = model.rotation(qwen_image.positions((5, 5), 10))
    for part, name in zip(rotation, ("cos", "sin"), strict=True):
        expected = [taps[f"tap/rope_{stream}_{name}"] for stream in ("image", "text")]
        close(part[0], np.concatenate(expected), 1e-6)
    modulations = model.modulations(embedding)
    for i, block in enumerate(model.transformer_blocks):
        both = modulations.blocks[i]
        image, text = block(image, text, rotation, None, (both[:, 0], both[:, 1]))
        close(image, taps[f"tap/transformer_blocks.{i}/image"], ATOL_GIVEN_TIMESTEP)
        close(text, taps[f"tap/transformer_blocks.{i}/text"], ATOL_GIVEN_TIMESTEP)
    close(
        model.final(image, modulations)[0],
        np.asarray(model.final_linear(jnp.asarray(taps["tap/norm_out"])))[0],
        ATOL_GIVEN_TIMESTEP,
    )


def test_the_embedding_of_a_timestep():
    close(
        module().timestep_embedder(jnp.array([600.0])),
        golden.arrays("transformer")["tap/time_text_embed"],
        ATOL,
    )


def test_positions_are_centred_and_those_of_text_follow():
    at = qwen_image.positions((3, 4), 3)[0]
    assert at[:, 1].tolist() == [-2] * 4 + [-1] * 4 + [0] * 4 + [2, 3, 4]
    assert at[:12, 2].tolist() == [-2, -1, 0, 1] * 3
    assert at[:12, 0].tolist() == [0] * 12
    assert (at[12:] == at[12:, :1]).all()


def test_packed_latents_have_the_channel_outermost():
    found = golden.arrays("transformer")
    latents = jnp.asarray(found["10x10/latents"])
    close(packing.pack(latents), found["10x10/x"], 0)
    close(packing.unpack(packing.pack(latents), (5, 5)), latents, 0)
    tall = jnp.asarray(found["14x8/x"])
    close(packing.pack(packing.unpack(tall, (7, 4))), tall, 0)


@pytest.mark.campaign
def test_16_bit_weights_keep_timesteps_apart():
    """bfloat16 has no number between 600 and 604: rounded, both would be one timestep."""
    x, caption = golden.arrays("transformer")["10x10/x"][:1], captions()[1]
    inputs = x[[0, 0]], [0.6, 0.601], [caption] * 2, (5, 5)
    out, exact = forward(*inputs, dtype="bfloat16"), forward(*inputs)
    assert out.dtype == np.float32
    assert np.std(out - exact) < 0.1 * np.std(exact)
    one, other = np.asarray(module("bfloat16").timestep_embedder(jnp.array([600.0, 601.0])))
    assert np.abs(one - other).max() > 0.05


def test_the_table_is_the_checkpoint_of_diffusers():
    config = qwen_image.COMPONENT.read(golden.config("transformer"))
    rows = qwen_image.COMPONENT.weight_rows(config)
    assert {row.name: row.shape for row in rows} == golden.shapes("transformer")


def test_published_sizes():
    shapes = qwen_image.COMPONENT.abstract(PUBLISHED, jnp.dtype("bfloat16"))[1]
    assert sum(math.prod(shape.shape) for shape in shapes.values()) == 20_430_401_088
    # An index of 32 bits reaches every element of every array.
    assert max(math.prod(shape.shape) for shape in shapes.values()) < 2**31


@pytest.mark.parametrize(("side", "tera"), [(32, 15.7), (64, 69.3)])
def test_flops_of_the_published_model(side, tera):
    flops = qwen_image_config.flops(PUBLISHED, side * side, 64)
    assert flops / 1e12 == pytest.approx(tera, abs=0.05)


@pytest.mark.parametrize(
    ("shape", "bucket", "grid", "message"),
    [
        ((1, 25, 64), 8, (5, 4), "20 tokens"),
        ((1, 25, 60), 8, (5, 5), "64 channels"),
        ((1, 25, 64), 4095, (5, 5), "4096 positions"),
    ],
)
def test_shapes_without_positions_are_refused(shape, bucket, grid, message):
    inputs = (
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
        jax.ShapeDtypeStruct((1, bucket, 64), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(module(), grid=grid), *inputs)


BAD = {
    "patch_size": (1, "patch_size=1"),
    "guidance_embeds": (True, "guidance_embeds=True"),
    "zero_cond_t": (True, "zero_cond_t=True"),
    "use_additional_t_cond": (True, "use_additional_t_cond=True"),
    "use_layer3d_rope": (True, "use_layer3d_rope=True"),
    "out_channels": (8, "in_channels=64 must be 4 times out_channels=8"),
    "attention_head_dim": (64, r"sum\(axes_dims_rope\)=32"),
    "axes_dims_rope": ([8, 24], "three positive integers"),
    "num_layer": (2, "num_layer=2.*did you mean 'num_layers'"),
}


@pytest.mark.parametrize("key", BAD)
def test_what_cannot_be_served_is_named(key):
    value, message = BAD[key]
    with pytest.raises(errors.ConfigError, match=message):
        qwen_image_config.read({**golden.config("transformer"), key: value})


def test_keys_of_old_files_are_tolerated():
    old = {key: value for key, value in golden.config("transformer").items() if "_" in key}
    for key in ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
        old.pop(key)
    old["pooled_projection_dim"] = 768
    assert qwen_image_config.read(old) == qwen_image_config.read(golden.config("transformer"))
