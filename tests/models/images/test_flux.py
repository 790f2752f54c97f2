"""The transformer of FLUX.1 against diffusers 0.42.1, and its rows against themselves alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_flux as golden
from support import marks

from jdllm.models import loading
from jdllm.models.images import flux

SIZES = {"12x12": (6, 6), "14x8": (7, 4)}  # and their rows and columns of tokens
SIGMAS, SCALES = (1.0, 0.6, 0.05), (1.0, 3.5, 7.0)
# Measured by the makers of the arrays: angles of 3500 rad differ by 2e-4 from one exp to another.
ATOL, ATOL_GIVEN_EMBEDDING, ATOL_BATCH = 6e-4, 3e-5, 5e-5


@functools.cache
def compiled(dtype="float32"):
    graphdef, params = golden.loaded("transformer", dtype)

    @functools.partial(jax.jit, static_argnames="grid")
    def run(params, packed, sigma, guidance, text, pooled, lens, grid):
        model = loading.merge(graphdef, params)
        modulations = model.modulate(sigma, guidance, model.embed_pooled(pooled))
        return model.denoise(packed, modulations, model.embed_text(text), lens, grid)

    return functools.partial(run, params)


def module():
    return loading.merge(*golden.loaded("transformer"))


def texts(*names, length=64):
    """Returns (embeddings, vectors) of prompts."""
    text = golden.arrays("text")
    embeds = np.stack([text[f"{name}/t5_embeds"][:length] for name in names])
    return embeds, np.stack([text[f"{name}/pooled"] for name in names])


def forward(
    packed, sigma, guidance, embeds, pooled, *, grid, lens=None, bucket=None, dtype="float32"
):
    B, L, _ = embeds.shape
    lens = [L] * B if lens is None else lens
    padded = np.full((B, bucket or L, embeds.shape[2]), 1e3, np.float32)
    for i, length in enumerate(lens):
        padded[i, :length] = embeds[i, :length]
    out = compiled(dtype)(
        jnp.asarray(packed),
        jnp.asarray(sigma, jnp.float32),
        jnp.asarray(guidance, jnp.float32),
        jnp.asarray(padded),
        jnp.asarray(pooled),
        jnp.asarray(lens, jnp.int32),
        grid=grid,
    )
    return np.asarray(out)


def close(actual, expected, atol):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("size", marks.every(2, SIZES))
@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("prompt", range(3))
def test_a_row_alone(size, step, prompt):
    expected = golden.arrays("transformer")
    x = expected[f"{size}/x"][prompt : prompt + 1]
    out = forward(x, SIGMAS[step : step + 1], [3.5], *texts(f"p{prompt}"), grid=SIZES[size])
    assert out.dtype == np.float32
    close(out[0], expected[f"{size}/t{step}/p{prompt}"], ATOL)


@pytest.mark.parametrize("size", marks.every(2, SIZES))
def test_rows_of_unequal_timesteps_and_scales(size):
    expected = golden.arrays("transformer")
    x = expected[f"{size}/x"]
    embeds, pooled = texts("p0", "p1", "p2")
    out = forward(x, SIGMAS, SCALES, embeds, pooled, grid=SIZES[size])
    close(out, expected[f"{size}/batch_mixed_t"], ATOL)
    for i in range(3):
        row = slice(i, i + 1)
        alone = forward(
            x[row], SIGMAS[row], SCALES[row], embeds[row], pooled[row], grid=SIZES[size]
        )
        close(out[row], alone, ATOL_BATCH)


def test_rows_of_unequal_text_lengths():
    """What a bucket pads behind a text is no part of it, however large its values are."""
    x = golden.arrays("transformer")["12x12/x"]
    embeds, pooled = texts("p0", "p1", "p2")
    lens = [64, 1, 23]
    out = forward(x, SIGMAS, SCALES, embeds, pooled, grid=(6, 6), lens=lens, bucket=96)
    for i, length in enumerate(lens):
        row = slice(i, i + 1)
        alone = forward(
            x[row], SIGMAS[row], SCALES[row], embeds[row, :length], pooled[row], grid=(6, 6)
        )
        close(out[row], alone, ATOL_BATCH)
    close(
        out[:1], forward(x[:1], SIGMAS[:1], SCALES[:1], embeds[:1], pooled[:1], grid=(6, 6)), 5e-5
    )


def test_parts():
    taps = golden.arrays("transformer")
    model = module()
    embeds, pooled = texts("p1")
    x, text = model.x_embedder(taps["12x12/x"][1:2]), model.embed_text(jnp.asarray(embeds))
    close(x, taps["tap/x_embedder"], ATOL_GIVEN_EMBEDDING)
    close(text, taps["tap/context_embedder"], ATOL_GIVEN_EMBEDDING)
    vector = model.embed_pooled(jnp.asarray(pooled))
    embedding = model.embed(jnp.array([0.6]), jnp.array([3.5]), vector)
    close(embedding, taps["tap/time_text_embed"], 3e-4)  # by its angles, see ATOL
    embedding = jnp.asarray(taps["tap/time_text_embed"])
    rotation = model.rotation((6, 6), 64)
    # diffusers has the text first, and repeats each angle for both dims of a pair.
    for found, name in zip(rotation, ("cos", "sin")):
        expected = taps[f"tap/rope_{name}"]
        close(np.repeat(found[0, :36], 2, axis=-1), expected[64:], 1e-6)
        close(np.repeat(found[0, 36:], 2, axis=-1), expected[:64], 1e-6)
    lengths = jnp.array([100])
    modulations = model.modulations(embedding)
    for i, block in enumerate(model.transformer_blocks):
        of_both = modulations.image[:, i], modulations.text[:, i]
        x, text = block(x, text, rotation, lengths, of_both)
        close(x, taps[f"tap/transformer_blocks.{i}/image"], ATOL_GIVEN_EMBEDDING)
        close(text, taps[f"tap/transformer_blocks.{i}/text"], ATOL_GIVEN_EMBEDDING)
    joint = jnp.concatenate([x, text], axis=1)
    for i, block in enumerate(model.single_transformer_blocks):
        joint = block(joint, rotation, lengths, modulations.single[:, i])
        close(joint[:, :36], taps[f"tap/single_transformer_blocks.{i}/image"], 3e-5)
        close(joint[:, 36:], taps[f"tap/single_transformer_blocks.{i}/text"], 3e-5)
    close(model.final(joint[:, :36], modulations)[0], taps["12x12/t1/p1"], ATOL_GIVEN_EMBEDDING)


def test_a_model_without_guidance_does_not_read_it():
    """As schnell is."""
    hf = golden.config_json("transformer") | {"guidance_embeds": False}
    config = flux.COMPONENT.read(hf)
    graphdef, shapes = flux.COMPONENT.abstract(config, jnp.dtype(jnp.float32))
    params = golden.loaded("transformer")[1]
    assert {name.split(".")[0] for name in params.keys() - shapes.keys()} == {"guidance_embedder"}
    model = loading.merge(graphdef, {name: params[name] for name in shapes})
    embeds, pooled = texts("p1")
    x = jnp.asarray(golden.arrays("transformer")["12x12/x"][1:2])

    def run(model, guidance):
        vector = model.embed_pooled(jnp.asarray(pooled))
        modulations = model.modulate(jnp.array([0.6]), jnp.array([guidance]), vector)
        text = model.embed_text(jnp.asarray(embeds))
        return model.denoise(x, modulations, text, jnp.array([64]), (6, 6))

    close(run(model, 3.5), run(model, 7.0), 0)
    # The same model with an embedder that gives nothing.
    whole = module()
    last = whole.guidance_embedder.linear_2
    last.weight[...], last.bias[...] = 0 * last.weight[...], 0 * last.bias[...]
    close(run(model, 3.5), run(whole, 3.5), 1e-6)


def test_noise_levels_and_guidance_are_float32_whatever_the_weights_are():
    """Guidance 3.5 and 3.504 are one in bfloat16, times 1000; so are timesteps of 600 and 601."""
    x = golden.arrays("transformer")["12x12/x"][:1]
    given = texts("p1")

    def run(sigma, guidance):
        out = forward(x, [sigma], [guidance], *given, grid=(6, 6), dtype="bfloat16")
        assert out.dtype == np.float32
        return out

    base = run(0.6, 3.5)
    assert np.abs(base - run(0.6, 3.504)).max() > 0.05
    assert np.abs(base - run(0.601, 3.5)).max() > 0.02
    wanted = golden.arrays("transformer")["12x12/t1/p0"]
    out = forward(x, [0.6], [3.5], *texts("p0"), grid=(6, 6), dtype="bfloat16")[0]
    assert np.abs(out - wanted).mean() < 0.05
