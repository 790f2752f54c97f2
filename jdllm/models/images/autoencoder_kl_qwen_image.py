"""The autoencoder of Qwen-Image (`AutoencoderKLQwenImage`): latents to images.

It is one of videos. A kernel over time has its last tap at the current frame, and the others at
frames before it, which of an image are zeros. So of each kernel only the last tap is read, and the
decoder is one over pictures; what doubles the number of frames does nothing to the first.

All is as diffusers 0.42.1 computes it for one frame.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from jdllm import errors
from jdllm.models import hf_config
from jdllm.models.images import component
from jdllm.models.images.autoencoder import coders
from jdllm.models.images.autoencoder.layers import Conv
from jdllm.models.images.autoencoder_kl import at

_MOST_BLOCKS = 16
# The keys of config.json, with the defaults of the published class.
_DEFAULTS: Mapping[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,  # of training
    "input_channels": 3,
    "latents_mean": [-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134,
                     -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921],
    "latents_std": [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526,
                    2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160],
}  # fmt: skip
_ONLY_DEFAULT = ("attn_scales", "input_channels")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageAutoencoderConfig:
    """The sizes of the decoder; `widths` in its order, one for each block.

    The pipeline's latents are `(z - mean) / std`, by channel.
    """

    widths: tuple[int, ...]
    resnets_per_block: int
    latent_channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def scale(self) -> int:
        """Pixels per position of a latent, on each side."""
        return 2 ** (len(self.widths) - 1)

    @property
    def block_widths(self) -> list[tuple[int, ...]]:
        """The input of each block, then the output of each resnet; upsamplers halve the width."""
        before = (self.widths[0], *(width // 2 for width in self.widths[:-1]))
        return [
            (first, *[width] * self.resnets_per_block) for first, width in zip(before, self.widths)
        ]


class AutoencoderKLQwenImage(nnx.Module):
    """The decoder, with the pipeline's normalisation of latents."""

    def __init__(self, config: QwenImageAutoencoderConfig, dtype: jnp.dtype):
        self.config = config
        self.dtype = dtype
        channels = config.latent_channels
        self.post_quant_conv = Conv(channels, channels, dtype, size=1)
        self.decoder = coders.Decoder(
            coders.DecoderPlan(
                latent_channels=channels,
                blocks=config.block_widths,
                num_groups=None,
                has_mid_attention=True,
            ),
            dtype,
        )

    def decode(
        self, latents: Float32[Array, "B C h w"], *, tile: int = coders.TILE
    ) -> Float32[Array, "B H W 3"]:
        """Returns the images of the pipeline's latents, about -1 to 1 and not clipped.

        A block with more than `tile` (an even number) positions on a side is computed in tiles.
        """
        return self.decode_denormalised(self.denormalise(latents), tile=tile)

    def denormalise(self, latents: Float32[Array, "B C h w"]) -> Float32[Array, "B C h w"]:
        """Returns z = latents * std + mean."""
        std, mean = (jnp.array(x)[:, None, None] for x in (self.config.std, self.config.mean))
        return latents * std + mean

    def decode_denormalised(
        self, z: Float32[Array, "B C h w"], *, tile: int = coders.TILE
    ) -> Float32[Array, "B H W 3"]:
        """Returns the images of latents as the encoder gives them; see `decode`."""
        x = self.post_quant_conv(jnp.moveaxis(z, 1, -1).astype(self.dtype))
        return self.decoder(x, tile=tile).astype(jnp.float32)


def read(hf: Mapping[str, Any]) -> QwenImageAutoencoderConfig:
    """Returns the config; raises a ConfigError that names the first key that cannot be served.

    A missing key has the default of the class. Keys that begin with an underscore are bookkeeping
    of diffusers.
    """
    given = {k: value for k, value in hf.items() if value is not None and not k.startswith("_")}
    for key, value in given.items():
        if key not in _DEFAULTS:
            raise errors.ConfigError(
                f"config.json: AutoencoderKLQwenImage has no key {key}={errors.quote(value)}"
                f"{errors.nearest(key, _DEFAULTS)}"
            )
        if key in _ONLY_DEFAULT and value != _DEFAULTS[key]:
            _refuse(key, value, repr(_DEFAULTS[key]))
    values = {**_DEFAULTS, **given}
    channels = hf_config.integer(values, "z_dim")
    config = QwenImageAutoencoderConfig(
        widths=_widths(values),
        resnets_per_block=hf_config.integer(values, "num_res_blocks", high=64) + 1,
        latent_channels=channels,
        mean=_numbers(values, "latents_mean", channels),
        std=_numbers(values, "latents_std", channels),
    )
    _check_downsample(values, len(config.widths) - 1)
    return config


def flops(config: QwenImageAutoencoderConfig, height: int, width: int) -> int:
    """Returns the floating-point operations of decoding latents [height, width].

    Two for each multiply-add of convolutions, linears and attention; norms are left out.
    """
    positions, top, latent = height * width, config.widths[0], config.latent_channels
    per_position = latent**2 + 9 * latent * top + 2 * 18 * top**2
    multiply_adds = positions * (per_position + 4 * top**2 + 2 * positions * top)
    before = top
    for i, (first, *widths) in enumerate(config.block_widths):
        if i > 0:
            positions *= 4
            multiply_adds += positions * 9 * before * first  # the upsampler
        for after in widths:
            shortcut = first * after if first != after else 0
            multiply_adds += positions * (9 * first * after + 9 * after**2 + shortcut)
            first = after
        before = first
    return 2 * (multiply_adds + positions * 9 * before * 3)


def _widths(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the width of each block of the decoder, which has those of the encoder reversed."""
    key, base = "dim_mult", hf_config.integer(values, "base_dim")
    factors = values[key]
    is_list = isinstance(factors, list | tuple) and 1 <= len(factors) <= _MOST_BLOCKS
    if not is_list:
        _refuse(key, factors, f"a list of 1 to {_MOST_BLOCKS} factors of base_dim")
    widths = tuple(base * hf_config.integer({key: factor}, key) for factor in factors[::-1])
    if any(width % 2 for width in widths[:-1]):
        _refuse(key, factors, f"factors that make base_dim={base} even where it is halved")
    return widths


def _numbers(values: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    found = values[key]
    if not isinstance(found, list | tuple) or len(found) != count:
        _refuse(key, found, f"a number for each of z_dim={count} channels")
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            _refuse(key, one, "finite numbers")
    return tuple(map(float, found))


def _check_downsample(values: Mapping[str, Any], count: int) -> None:
    """Raises unless each size has a flag; which ones double the frames too does not matter."""
    key = "temperal_downsample"
    flags = values[key]
    if not isinstance(flags, list | tuple) or [type(one) for one in flags] != [bool] * count:
        _refuse(key, flags, f"{count} flags, one less than dim_mult has factors")


def _refuse(key: str, value: Any, supported: str) -> NoReturn:
    raise errors.ConfigError(
        f"config.json: {key}={errors.quote(value)} is not supported for AutoencoderKLQwenImage; "
        f"supported: {supported}"
    )


_RESNET = """
norm1.gamma             norm1.weight[1x1x1]
conv1.weight            conv1.kernel[conv@2/3]
conv1.bias              conv1.bias
norm2.gamma             norm2.weight[1x1x1]
conv2.weight            conv2.kernel[conv@2/3]
conv2.bias              conv2.bias
"""
_SHORTCUT = """
conv_shortcut.weight    conv_shortcut.kernel[conv@0/1]
conv_shortcut.bias      conv_shortcut.bias
"""
_ATTENTION = """
norm.gamma              group_norm.weight[1x1]
to_qkv.weight           w_qkv[1x1]
to_qkv.bias             b_qkv
proj.weight             w_out[1x1]
proj.bias               b_out
"""
_UPSAMPLER = """
resample.1.weight       conv.kernel[conv]
resample.1.bias         conv.bias
"""
_CONV = """
weight                  kernel[conv@2/3]
bias                    bias
"""
_WEIGHTS = (
    """
    post_quant_conv.weight      post_quant_conv.kernel[conv@0/1]
    post_quant_conv.bias        post_quant_conv.bias
    decoder.norm_out.gamma      decoder.conv_norm_out.weight[1x1x1]
    """
    + at(_CONV, "decoder.conv_in", "decoder.conv_out")
    + at(_RESNET, "decoder.mid_block.resnets.{i}", "decoder.up_blocks.{i}.resnets.{j}")
    + at(_SHORTCUT, "decoder.up_blocks.{i}.resnets.{j}")
    + at(_ATTENTION, "decoder.mid_block.attentions.{i}")
    + at(_UPSAMPLER, "decoder.up_blocks.{i}.upsamplers.{j}")
)


def _is_unused(_config: QwenImageAutoencoderConfig, tensor: str) -> bool:
    """Says whether a tensor is of the encoder, or of what doubles the frames after the first."""
    return tensor.startswith(("encoder.", "quant_conv.")) or ".time_conv." in tensor


COMPONENT = component.Component(
    class_names=("AutoencoderKLQwenImage",),
    read=read,
    build=AutoencoderKLQwenImage,
    weights=lambda _: _WEIGHTS,
    is_unused=_is_unused,
    example={
        "base_dim": 2,
        "z_dim": 3,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.0] * 3,
        "latents_std": [1.0] * 3,
    },
)
