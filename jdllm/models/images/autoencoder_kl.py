"""The Flux autoencoder (`AutoencoderKL`): images to latents and back.

Pipelines hold latents [B, C, h, w] in float32; inside, the channels come last. Serving builds the
decoder only. Blocks of the decoder whose result is larger than a tile are computed in tiles, with
the result of the whole picture (see `tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jdllm.models.images import component
from jdllm.models.images.autoencoder import coders
from jdllm.models.images.autoencoder.config import AutoencoderConfig, read
from jdllm.models.images.autoencoder.layers import Conv

# The range to which diffusers bounds the logarithms of variances.
_LOG_VARIANCES = (-30.0, 20.0)

Latents = Float32[Array, "B C h w"]
Images = Float32[Array, "B H W 3"]


class AutoencoderKL(nnx.Module):
    """The decoder, with the pipeline's normalisation of latents."""

    def __init__(self, config: AutoencoderConfig, dtype: jnp.dtype):
        self.config = config
        self.dtype = dtype
        self.post_quant_conv = (
            Conv(config.latent_channels, config.latent_channels, dtype, size=1)
            if config.has_post_quant_conv
            else None
        )
        self.decoder = coders.Decoder(
            coders.DecoderPlan(
                latent_channels=config.latent_channels,
                blocks=coders.block_widths(
                    config.block_channels[::-1], config.layers_per_block + 1
                ),
                num_groups=config.num_groups,
                has_mid_attention=config.has_mid_attention,
            ),
            dtype,
        )

    def decode(self, latents: Latents, *, tile: int = coders.TILE) -> Images:
        """Returns the images of the pipeline's latents, about -1 to 1 and not clipped.

        A block with more than `tile` (an even number) positions on a side is computed in tiles.
        """
        return self.decode_denormalised(self.denormalise(latents), tile=tile)

    def denormalise(self, latents: Latents) -> Latents:
        """Returns z = latents / scaling_factor + shift_factor."""
        return latents / self.config.scaling_factor + self.config.shift_factor

    def decode_denormalised(self, z: Latents, *, tile: int = coders.TILE) -> Images:
        """Returns the images of latents as the encoder gives them; see `decode`."""
        x = jnp.moveaxis(z, 1, -1).astype(self.dtype)
        if self.post_quant_conv is not None:
            x = self.post_quant_conv(x)
        return self.decoder(x, tile=tile).astype(jnp.float32)


class AutoencoderKLWithEncoder(AutoencoderKL):
    """Decoder and encoder, for training."""

    def __init__(self, config: AutoencoderConfig, dtype: jnp.dtype):
        super().__init__(config, dtype)
        both = 2 * config.latent_channels
        self.quant_conv = Conv(both, both, dtype, size=1) if config.has_quant_conv else None
        self.encoder = coders.Encoder(config, dtype)

    def encode(self, images: Float[Array, "B H W 3"]) -> tuple[Latents, Latents]:
        """Returns (mean, logarithm of the variance) of the pipeline's latents.

        `images` are -1 to 1, with sides that are multiples of the config's `scale`. A draw is
        `mean + exp(log_variance / 2) * noise`. Before the normalisation the logarithm is between
        -30 and 20, as in diffusers.
        """
        scale, factor = self.config.scale, self.config.scaling_factor
        if any(side % scale for side in images.shape[1:3]):
            raise ValueError(f"both sides of {images.shape=} must be multiples of {scale}")
        moments = self.encoder(images.astype(self.dtype))
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        moments = jnp.moveaxis(moments, -1, 1).astype(jnp.float32)
        mean, log_variance = jnp.split(moments, 2, axis=1)
        mean = (mean - self.config.shift_factor) * factor
        return mean, jnp.clip(log_variance, *_LOG_VARIANCES) + 2 * math.log(factor)


_RESNET = """
norm1.weight            norm1.weight
norm1.bias              norm1.bias
conv1.weight            conv1.kernel[conv]
conv1.bias              conv1.bias
norm2.weight            norm2.weight
norm2.bias              norm2.bias
conv2.weight            conv2.kernel[conv]
conv2.bias              conv2.bias
"""
_SHORTCUT = """
conv_shortcut.weight    conv_shortcut.kernel[conv]
conv_shortcut.bias      conv_shortcut.bias
"""
_ATTENTION = """
group_norm.weight                   group_norm.weight
group_norm.bias                     group_norm.bias
to_q.weight|query.weight            w_qkv[0/3]
to_q.bias|query.bias                b_qkv[0/3]
to_k.weight|key.weight              w_qkv[1/3]
to_k.bias|key.bias                  b_qkv[1/3]
to_v.weight|value.weight            w_qkv[2/3]
to_v.bias|value.bias                b_qkv[2/3]
to_out.0.weight|proj_attn.weight    w_out
to_out.0.bias|proj_attn.bias        b_out
"""
_NORM = """
weight                  weight
bias                    bias
"""
_CONV = """
weight                  kernel[conv]
bias                    bias
"""


def at(rows: str, *places: str) -> str:
    """Returns the rows with all names under each place, in the checkpoint and in the module."""
    pairs = [line.split() for line in rows.strip().splitlines()]
    return "".join(
        f"{at}.{a.replace('|', f'|{at}.')} {at}.{b}\n" for at in places for a, b in pairs
    )


_DECODER = (
    at(_CONV, "post_quant_conv", "decoder.conv_in", "decoder.conv_out")
    + at(_NORM, "decoder.conv_norm_out")
    + at(_RESNET, "decoder.mid_block.resnets.{i}", "decoder.up_blocks.{i}.resnets.{j}")
    + at(_SHORTCUT, "decoder.up_blocks.{i}.resnets.{j}")
    + at(_ATTENTION, "decoder.mid_block.attentions.{i}")
    + at(_CONV, "decoder.up_blocks.{i}.upsamplers.{j}.conv")
)
_ENCODER = (
    at(_CONV, "quant_conv", "encoder.conv_in", "encoder.conv_out")
    + at(_NORM, "encoder.conv_norm_out")
    + at(_RESNET, "encoder.mid_block.resnets.{i}", "encoder.down_blocks.{i}.resnets.{j}")
    + at(_SHORTCUT, "encoder.down_blocks.{i}.resnets.{j}")
    + at(_ATTENTION, "encoder.mid_block.attentions.{i}")
    + at(_CONV, "encoder.down_blocks.{i}.downsamplers.{j}.conv")
)
_EXAMPLE: Mapping[str, Any] = {
    "block_out_channels": [4, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "latent_channels": 3,
    "norm_num_groups": 2,
    "scaling_factor": 0.5,
}


def _is_of_encoder(_config: AutoencoderConfig, tensor: str) -> bool:
    return tensor.startswith(("encoder.", "quant_conv."))


COMPONENT = component.Component(
    class_names=("AutoencoderKL",),
    read=read,
    build=AutoencoderKL,
    weights=lambda _: _DECODER,
    example=_EXAMPLE,
    is_unused=_is_of_encoder,
)
WITH_ENCODER = component.Component(
    class_names=("AutoencoderKL",),
    read=read,
    build=AutoencoderKLWithEncoder,
    weights=lambda _: _DECODER + _ENCODER,
    example=_EXAMPLE,
)
