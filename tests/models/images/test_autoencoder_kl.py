"""The decoder of `AutoencoderKL` against diffusers; its table, config and counts."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_autoencoder

from jdllm import errors
from jdllm.checkpoint import weight_table
from jdllm.models import loading
from jdllm.models.images import autoencoder_kl
from jdllm.models.images.autoencoder import config as config_lib
from jdllm.models.images.autoencoder import layers
from jdllm.models.images.autoencoder.config import read
from jdllm.models.images.pixels import to_uint8

ATOL = 5e-5  # the goldens' tolerance for decoded images
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def golden():
    return np.load(tiny_autoencoder.GOLDEN / "vae.npz")


@pytest.fixture(scope="module")
def vae():
    return tiny_autoencoder.model()


def channels_first(x):
    return np.moveaxis(np.asarray(x), -1, 1)


@pytest.mark.parametrize("size", [pytest.param("12x12", marks=pytest.mark.campaign), "4x6"])
def test_decodes_as_diffusers(vae, golden, size):
    images = vae.decode_denormalised(jnp.asarray(golden[f"decode/{size}/z"]))
    assert images.dtype == jnp.float32
    np.testing.assert_allclose(channels_first(images), golden[f"decode/{size}/out"], atol=ATOL)
    pixels = np.asarray(to_uint8(images)).astype(int)
    off = np.abs(pixels - golden[f"decode/{size}/uint8"])
    assert off.max() <= 1 and (off > 0).mean() < 1e-3


def test_each_part_is_that_of_diffusers(vae, golden):
    decoder, taps = vae.decoder, {}
    x = taps["conv_in"] = decoder.conv_in(jnp.moveaxis(golden["decode/4x6/z"][:1], 1, -1))
    taps["mid_block.attentions.0"] = decoder.mid_block.attentions[0](
        decoder.mid_block.resnets[0](x)
    )
    x = taps["mid_block"] = decoder.mid_block(x)
    for i, block in enumerate(decoder.up_blocks):
        for layer in (*block.resnets, *block.upsamplers):
            x = layer(x)
        taps[f"up_blocks.{i}"] = x
    taps["conv_norm_out"] = decoder.conv_norm_out(x)
    names = [name for name in golden if "/tap/" in name]
    assert {name.partition("/tap/decoder.")[2] for name in names} == set(taps)
    for name, x in taps.items():
        expected = golden[f"decode/4x6/tap/decoder.{name}"]
        np.testing.assert_allclose(channels_first(x), expected, atol=ATOL, err_msg=name)


def test_latents_are_denormalised_by_shift_and_scale(vae, golden):
    np.testing.assert_allclose(vae.denormalise(golden["scale/in"]), golden["scale/out"], atol=1e-6)
    latents = (golden["decode/4x6/z"] - 0.1159) * 0.3611
    images = channels_first(vae.decode(jnp.asarray(latents)))
    np.testing.assert_allclose(images, golden["decode/4x6/out"], atol=ATOL)


def test_a_row_does_not_see_its_batch(vae, golden):
    z = jnp.asarray(golden["decode/4x6/z"])
    alone = jnp.concatenate([vae.decode_denormalised(z[i : i + 1]) for i in range(len(z))])
    np.testing.assert_allclose(vae.decode_denormalised(z), alone, atol=ATOL)


def test_pixels_are_clipped_and_rounded_half_to_even():
    values = np.array([-9.0, -1.0, 0.0, 1.0, 1.5, np.inf], np.float32)
    pixels = to_uint8(jnp.asarray(values))
    assert pixels.dtype == jnp.uint8
    assert pixels.tolist() == [0, 0, 128, 255, 255, 255]  # 127.5 rounds to 128


@pytest.mark.campaign
def test_bfloat16_has_float32_statistics_and_bfloat16_convolutions(golden):
    z = jnp.asarray(golden["decode/12x12/z"])
    vae = tiny_autoencoder.model(dtype=jnp.bfloat16)
    out = channels_first(vae.decode_denormalised(z))
    expected = golden["decode/12x12/out"]
    assert out.dtype == np.float32
    # bfloat16 has 8 bits: an error of 2**-8 in each of some 25 layers adds up to about 2 %.
    assert np.std(out - expected) < 0.04 * np.std(expected)
    text = jax.jit(vae.decode_denormalised).lower(z).as_text()
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) > 20
    assert not any("f32>" in line for line in convolutions)


def test_the_table_is_the_checkpoint_of_diffusers():
    found = tiny_autoencoder.tensors()
    config = autoencoder_kl.COMPONENT.read(tiny_autoencoder.HF)
    rows = {row.name: row for row in autoencoder_kl.WITH_ENCODER.weight_rows(config)}
    assert {name: row.shape for name, row in rows.items()} == {
        name: array.shape for name, array in found.items()
    }
    served = {row.name for row in autoencoder_kl.COMPONENT.weight_rows(config)}
    unused = {name for name in found if autoencoder_kl.COMPONENT.is_unused(config, name)}
    assert served | unused == set(found) and not served & unused
    params = tiny_autoencoder.params(tiny_autoencoder.HF, found)
    for name, row in rows.items():
        exported = row.read(np.asarray(params[row.target]))
        np.testing.assert_array_equal(exported, found[name], err_msg=name)


@pytest.mark.parametrize(
    ("component", "count"),
    # The published checkpoint holds 83,819,683 parameters, both halves together.
    [(autoencoder_kl.COMPONENT, 49_545_475), (autoencoder_kl.WITH_ENCODER, 83_819_683)],
    ids=["decoder", "both"],
)
def test_number_of_parameters(component, count):
    config = component.read(tiny_autoencoder.PUBLISHED)
    shapes = component.abstract(config, BFLOAT16)[1]
    assert sum(math.prod(shape.shape) for shape in shapes.values()) == count
    assert {shape.dtype for shape in shapes.values()} == {BFLOAT16}


@pytest.mark.parametrize(("side", "tera"), [(64, 2.48), (128, 9.92)])
def test_flops_of_the_published_model(side, tera):
    flops = config_lib.flops(read(tiny_autoencoder.PUBLISHED), side, side)
    logits_and_values = 4 * side**4 * 512
    assert (flops - logits_and_values) / 1e12 == pytest.approx(tera, abs=5e-3)


def test_flops_are_those_that_xla_counts():
    config = read({**tiny_autoencoder.PUBLISHED, "use_post_quant_conv": True})
    vae = autoencoder_kl.COMPONENT
    graphdef, shapes = vae.abstract(config, FLOAT32)
    z = jax.ShapeDtypeStruct((1, 16, 32, 48), jnp.float32)

    def decode(params, z):
        return loading.merge(graphdef, params).decode(z)

    counted = jax.jit(decode).lower(shapes, z).cost_analysis()["flops"]
    # XLA adds norms and activations, and leaves out the taps in the padding.
    assert config_lib.flops(config, 32, 48) == pytest.approx(counted, rel=0.02)


@pytest.mark.campaign
def test_post_quant_conv_comes_first():
    hf = {**tiny_autoencoder.HF, "use_post_quant_conv": True}
    weight = np.random.RandomState(0).standard_normal((16, 16)).astype(np.float32) / 4
    bias = np.arange(16, dtype=np.float32) / 8
    found = {
        **tiny_autoencoder.tensors(),
        "post_quant_conv.weight": weight[:, :, None, None],
        "post_quant_conv.bias": bias,
    }
    z = np.random.RandomState(1).standard_normal((1, 16, 4, 2)).astype(np.float32)
    mixed = np.einsum("oc,bchw->bohw", weight, z) + bias[:, None, None]
    out = tiny_autoencoder.model(hf, found).decode_denormalised(jnp.asarray(z))
    expected = tiny_autoencoder.model().decode_denormalised(jnp.asarray(mixed))
    np.testing.assert_allclose(out, expected, atol=ATOL)


def test_queries_in_turns_attend_alike(monkeypatch):
    rng = np.random.RandomState(0)
    attention = layers.Attention(8, 2, FLOAT32)
    for param in (attention.w_qkv, attention.w_out, attention.b_qkv):
        param[...] = jnp.asarray(rng.standard_normal(param.shape) / 8**0.5, jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 5, 7, 8)), jnp.float32)
    whole = attention(x)
    monkeypatch.setattr(layers, "MOST_LOGITS", 35 * 8)  # turns of 7, 7, 7, 7 and 7 queries
    np.testing.assert_allclose(attention(x), whole, atol=1e-5)
    monkeypatch.setattr(layers, "MOST_LOGITS", 35 * 11)  # 9, 9, 9 and 8
    np.testing.assert_allclose(attention(x), whole, atol=1e-5)


@functools.cache
def attention_to_a_large_picture():
    """Returns the attention to 1024 x 1024 pixels, lowered for a GPU."""
    attention = layers.Attention(512, 32, BFLOAT16)
    x = jax.ShapeDtypeStruct((1, 128, 128, 512), jnp.bfloat16)
    return jax.jit(attention).trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_a_large_picture_has_no_square_of_logits():
    text = attention_to_a_large_picture()
    assert "16384x512" in text
    assert "16384x16384" not in text


def test_no_queries_are_sliced_in_the_loop_over_turns():
    """On GPUs a copy of a moving slice keeps a loop from being part of a CUDA graph."""
    sliced = re.findall(r"dynamic_slice.*-> tensor<(.*)>", attention_to_a_large_picture())
    assert sliced and all(re.fullmatch(r"(1x)*i32", one) for one in sliced), sliced


def test_moments_keep_their_digits_far_from_zero():
    x = 3000 + np.random.RandomState(0).standard_normal((2, 9, 8, 4))
    x = x.astype(np.float32)
    groups = x.astype(np.float64).reshape(2, 72, 2, 2)
    moments = layers.GroupNorm(4, 2, FLOAT32).moments(jnp.asarray(x))
    np.testing.assert_allclose(moments.mean, groups.mean((1, 3)), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, groups.var((1, 3)), rtol=1e-3)


BAD = {
    "act_fn": ("relu", "act_fn='relu'"),
    "in_channels": (4, "in_channels=4"),
    "out_channels": (4, "out_channels=4"),
    "latents_mean": ([0.0], "latents_mean"),
    "latents_std": ([1.0], "latents_std"),
    "block_out_channels": ([], "block_out_channels"),
    "block_out_channels.": ([8, 8, 16, "x"], "block_out_channels='x'"),
    "down_block_types": (["DownEncoderBlock2D"] * 3, "down_block_types"),
    "up_block_types": (["AttnUpDecoderBlock2D"] * 4, "up_block_types"),
    "norm_num_groups": (3, "norm_num_groups=3"),
    "layers_per_block": (0, "layers_per_block=0"),
    "latent_channels": ("16", "latent_channels='16'"),
    "scaling_factor": (0, "scaling_factor=0"),
    "shift_factor": ("a", "shift_factor='a'"),
    "shift_factor.": (-(10**400), "shift_factor=.* a finite number"),
    "sample_size": ("1024", "sample_size='1024'"),
    "sample_size.": (float("nan"), "sample_size=nan"),
    "mid_block_add_attention": (1, "mid_block_add_attention=1"),
    "use_quant_conv": ("yes", "use_quant_conv='yes'"),
    "use_post_quant_conv": ("yes", "use_post_quant_conv='yes'"),
    "layer_per_block": (2, "layer_per_block=2.*did you mean 'layers_per_block'"),
}


@pytest.mark.parametrize("key", BAD)
def test_what_cannot_be_served_is_named(key):
    value, message = BAD[key]
    with pytest.raises(errors.ConfigError, match=message):
        read({**tiny_autoencoder.HF, key.rstrip("."): value})


@pytest.mark.parametrize(
    "key", ["block_out_channels", "layers_per_block", "latent_channels", "norm_num_groups"]
)
def test_a_missing_size_is_named(key):
    with pytest.raises(errors.ConfigError, match=key):
        read({k: v for k, v in tiny_autoencoder.HF.items() if k != key})


def test_missing_flags_have_the_defaults_of_diffusers():
    flags = ("use_quant_conv", "use_post_quant_conv", "mid_block_add_attention", "shift_factor")
    config = read({k: v for k, v in tiny_autoencoder.HF.items() if k not in flags})
    assert config.has_quant_conv and config.has_post_quant_conv and config.has_mid_attention
    assert config.shift_factor == 0 and config.scale == 8


def test_a_checkpoint_without_a_tensor_is_refused():
    found = tiny_autoencoder.tensors()
    shapes = {name: array.shape for name, array in found.items() if "decoder.conv_out" not in name}
    rows = autoencoder_kl.WITH_ENCODER.weight_rows(read(tiny_autoencoder.HF))
    with pytest.raises(errors.ConfigError, match=r"decoder\.conv_out\.weight"):
        weight_table.match(rows, shapes)
