"""The decoder of Qwen-Image against diffusers 0.42.1, its table, its config."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_qwen_image as golden
from support import marks

from jdllm import errors
from jdllm.models import loading
from jdllm.models.images import autoencoder_kl_qwen_image

ATOL = 5e-5  # of the goldens' README
ONE = autoencoder_kl_qwen_image.COMPONENT
HF = golden.config("vae")
PUBLISHED = autoencoder_kl_qwen_image.read({})  # the defaults of the class


@pytest.fixture(scope="module")
def vae():
    return loading.merge(*golden.params(ONE, "vae"))


def channels_first(images):
    return np.moveaxis(np.asarray(images), -1, 1)


def z():
    return jnp.asarray(golden.arrays("vae")["decode/4x6/z"])


def test_images_of_the_goldens(vae):
    images = channels_first(vae.decode_denormalised(z()))
    assert images.dtype == np.float32
    expected = golden.arrays("vae")["decode/4x6/out"]
    assert 0 < (np.abs(expected) == 1).mean() < 0.1  # diffusers clips
    np.testing.assert_allclose(np.clip(images, -1, 1), expected, atol=ATOL)
    assert np.abs(images).max() > 1


def test_every_block(vae):
    taps = {
        name.removeprefix("decode/4x6/tap/"): array
        for name, array in golden.arrays("vae").items()
        if "/tap/" in name
    }
    decoder = vae.decoder
    x = vae.post_quant_conv(jnp.moveaxis(z()[:1], 1, -1))
    found = {"post_quant_conv": x}
    found["decoder.conv_in"] = x = decoder.conv_in(x)
    attended = decoder.mid_block.attentions[0](decoder.mid_block.resnets[0](x))
    found["decoder.mid_block.attentions.0"] = attended
    found["decoder.mid_block"] = x = decoder.mid_block(x)
    for i in (0, 1):  # those of diffusers end with the upsampler
        for resnet in decoder.up_blocks[i].resnets:
            x = resnet(x)
        found[f"decoder.up_blocks.{i}"] = x = decoder.up_blocks[i].upsamplers[0](x)
    assert found.keys() == taps.keys()
    for name, array in found.items():
        np.testing.assert_allclose(channels_first(array)[0], taps[name], atol=ATOL, err_msg=name)


def test_latents_are_denormalised_by_channel(vae):
    latents = np.random.RandomState(0).standard_normal((2, 16, 3, 2)).astype(np.float32)
    expected = np.empty_like(latents)
    for channel, (mean, std) in enumerate(zip(HF["latents_mean"], HF["latents_std"], strict=True)):
        expected[:, channel] = latents[:, channel] * std + mean
    np.testing.assert_allclose(vae.denormalise(jnp.asarray(latents)), expected, atol=1e-6)
    whole = vae.decode(jnp.asarray(latents))
    np.testing.assert_allclose(whole, vae.decode_denormalised(jnp.asarray(expected)), atol=ATOL)


@pytest.mark.parametrize(
    ("batch", "height", "width", "tile"),
    marks.every(3, [(2, 8, 6, 32), (1, 9, 7, 24), (1, 3, 13, 40)]),
)
def test_tiles_give_the_whole_picture(vae, batch, height, width, tile):
    rng = np.random.RandomState(height)
    latents = jnp.asarray(rng.standard_normal((batch, 16, height, width)), jnp.float32)
    decode = jax.jit(vae.decode, static_argnames="tile")
    whole, tiled = decode(latents), decode(latents, tile=tile)
    assert np.std(whole) > 0.3
    np.testing.assert_allclose(tiled, whole, atol=ATOL)


@pytest.mark.campaign
def test_no_norm_sees_the_picture(vae):
    """So tiles need one pass: far from a change, nothing changes."""
    latents = jnp.zeros((1, 16, 1, 40))
    # Attention at the size of the latents does see all of it.
    x = jnp.moveaxis(latents, 1, -1)
    h = vae.decoder.mid_block(vae.decoder.conv_in(x))
    one = vae.decoder.level(3, vae.decoder.level(2, vae.decoder.level(1, vae.decoder.level(0, h))))
    h = h.at[:, :, 0].add(1.0)
    other = vae.decoder.level(
        3, vae.decoder.level(2, vae.decoder.level(1, vae.decoder.level(0, h)))
    )
    assert np.abs(one - other)[:, :, :8].max() > 1e-3
    np.testing.assert_array_equal(one[:, :, 160:], other[:, :, 160:])


@pytest.mark.campaign
def test_bfloat16_has_float32_norms(vae):
    found = loading.merge(*golden.params(ONE, "vae", "bfloat16")).decode_denormalised(z())
    exact = vae.decode_denormalised(z())
    assert found.dtype == jnp.float32
    assert np.std(found - exact) < 0.04 * np.std(exact)


def test_the_table_is_the_checkpoint_of_diffusers():
    stored = golden.shapes("vae")
    config = ONE.read(HF)
    rows = {row.name: row.shape for row in ONE.weight_rows(config)}
    unused = {name for name in stored if ONE.is_unused(config, name)}
    assert rows == {name: shape for name, shape in stored.items() if name not in unused}
    assert {name.split(".")[0] for name in unused} == {"encoder", "quant_conv", "decoder"}
    assert all("time_conv" in name for name in unused if name.startswith("decoder."))


def test_a_cut_kernel_is_not_exported():
    (row,) = (r for r in ONE.weight_rows(ONE.read(HF)) if r.name == "decoder.conv_in.weight")
    with pytest.raises(ValueError, match=r"conv_in\.weight holds more"):
        row.read(np.zeros((3, 3, 16, 24)))


def test_number_of_parameters():
    shapes = ONE.abstract(PUBLISHED, jnp.dtype(jnp.bfloat16))[1]
    count = sum(math.prod(shape.shape) for shape in shapes.values())
    assert count == 25_291_683 + 16 * 17  # the decoder, and the layer before it
    assert PUBLISHED.scale == 8


@pytest.mark.parametrize(("side", "tera"), [(64, 1.07), (128, 4.30)])
def test_flops_of_the_published_model(side, tera):
    flops = autoencoder_kl_qwen_image.flops(PUBLISHED, side, side)
    logits_and_values = 4 * side**4 * 384
    assert (flops - logits_and_values) / 1e12 == pytest.approx(tera, abs=6e-3)


BAD = {
    "attn_scales": ([1.0], r"attn_scales=\[1.0\]"),
    "input_channels": (4, "input_channels=4"),
    "dim_mult": ([], r"dim_mult=\[\]"),
    "dim_mult.": ([1, 2, "x", 4], "dim_mult='x'"),
    "base_dim": (0, "base_dim=0"),
    "temperal_downsample": ([True, True], "3 flags"),
    "z_dim": (8, "each of z_dim=8 channels"),
    "latents_mean": ([0.0] * 15, "latents_mean"),
    "latents_std": ([math.nan] * 16, "finite numbers"),
    "num_res_blocks": (0, "num_res_blocks=0"),
    "num_res_block": (2, "num_res_block=2.*did you mean 'num_res_blocks'"),
}


@pytest.mark.parametrize("key", BAD)
def test_what_cannot_be_served_is_named(key):
    value, message = BAD[key]
    with pytest.raises(errors.ConfigError, match=message):
        ONE.read({**HF, key.rstrip("."): value})


def test_half_a_width_must_be_whole():
    with pytest.raises(errors.ConfigError, match="even where it is halved"):
        ONE.read({**HF, "base_dim": 3, "dim_mult": [2, 1, 1, 1]})
