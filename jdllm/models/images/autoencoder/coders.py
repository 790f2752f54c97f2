"""Decoder and encoder: blocks of resnets, each block at its own size of the picture.

The blocks of the decoder whose result is larger than a tile are computed in tiles, with the result
of the whole picture (see `tiles`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from jdllm.models.images.autoencoder import layers, tiles
from jdllm.models.images.autoencoder.config import AutoencoderConfig
from jdllm.models.images.autoencoder.layers import Activate, Conv, Picture, Resnet

# Positions per side of what a block computes at once: 1024 x 1024 pixels are one tile.
TILE = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """The widths of a decoder: of each block its input, then the output of each resnet.

    Norms are of `num_groups` groups of channels over the picture, or (None) of each position. An
    upsampler ends with the width that the next block begins with.
    """

    latent_channels: int
    blocks: Sequence[Sequence[int]]
    num_groups: int | None
    has_mid_attention: bool


class UpBlock(nnx.Module):
    """Resnets of the given widths, then an upsampler to a width unless the block is the last."""

    def __init__(
        self, widths: Sequence[int], next_width: int | None, groups: int | None, dtype: jnp.dtype
    ):
        self.resnets = nnx.List(
            Resnet(before, after, groups, dtype) for before, after in itertools.pairwise(widths)
        )
        self.upsamplers = nnx.List(
            [] if next_width is None else [layers.Upsampler(widths[-1], next_width, dtype)]
        )


class DownBlock(nnx.Module):
    """Resnets of the given widths, then a downsampler unless the block is the last."""

    def __init__(self, widths: Sequence[int], groups: int, dtype: jnp.dtype, *, is_last: bool):
        self.resnets = nnx.List(
            Resnet(before, after, groups, dtype) for before, after in itertools.pairwise(widths)
        )
        self.downsamplers = nnx.List([] if is_last else [layers.Downsampler(widths[-1], dtype)])

    def __call__(self, x: Picture) -> Picture:
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x)
        return x


class Decoder(nnx.Module):
    """De-normalised latents [B, h, w, C] to images [B, H, W, 3], in the dtype of the weights."""

    def __init__(self, plan: DecoderPlan, dtype: jnp.dtype):
        first, last, groups = plan.blocks[0][0], plan.blocks[-1][-1], plan.num_groups
        self.has_picture_norms = groups is not None
        self.conv_in = Conv(plan.latent_channels, first, dtype)
        self.mid_block = layers.MidBlock(first, groups, dtype, has_attention=plan.has_mid_attention)
        self.up_blocks = nnx.List(
            UpBlock(widths, None if after is None else after[0], groups, dtype)
            for widths, after in zip(plan.blocks, (*plan.blocks[1:], None), strict=True)
        )
        self.conv_norm_out = layers.norm_of(last, groups, dtype)
        self.conv_out = Conv(last, 3, dtype)

    def __call__(self, z: Picture, *, tile: int = TILE) -> Picture:
        if tile < 2 or tile % 2:
            raise ValueError(f"{tile=} must be an even number of at least 2 positions")
        x = self.mid_block(self.conv_in(z))
        for i in range(len(self.up_blocks)):
            x = self._tiled_level(i, x, tile)
        return x

    def level(self, i: int, x: Picture, activate: Activate = layers.activate) -> Picture:
        """Returns what all layers of one size make of `x`: it begins with the doubling, if any.

        The last level ends with the image.
        """
        if i > 0:
            x = self.up_blocks[i - 1].upsamplers[0](x)
        for resnet in self.up_blocks[i].resnets:
            x = resnet(x, activate)
        if i == len(self.up_blocks) - 1:
            x = self.conv_out(activate(self.conv_norm_out, x))
        return x

    def _tiled_level(self, i: int, x: Picture, tile: int) -> Picture:
        # The first level has the size of the latents: it holds little, as the mid block does.
        if i == 0 or 2 * max(x.shape[1:3]) <= tile:
            return self.level(i, x)
        is_last = i == len(self.up_blocks) - 1
        num_norms = 2 * len(self.up_blocks[i].resnets) + is_last  # before convolutions of size 3
        return tiles.run(
            functools.partial(self.level, i),
            x,
            num_norms=num_norms if self.has_picture_norms else 0,
            num_convolutions=1 + num_norms,
            largest=tile,
        )


class Encoder(nnx.Module):
    """Images [B, H, W, 3] to means and logarithms of variances [B, h, w, 2 C]."""

    def __init__(self, config: AutoencoderConfig, dtype: jnp.dtype):
        widths = config.block_channels
        self.conv_in = Conv(3, widths[0], dtype)
        self.down_blocks = nnx.List(
            DownBlock(inner, config.num_groups, dtype, is_last=i == len(widths) - 1)
            for i, inner in enumerate(block_widths(widths, config.layers_per_block))
        )
        self.mid_block = layers.MidBlock(
            widths[-1], config.num_groups, dtype, has_attention=config.has_mid_attention
        )
        self.conv_norm_out = layers.GroupNorm(widths[-1], config.num_groups, dtype)
        self.conv_out = Conv(widths[-1], 2 * config.latent_channels, dtype)

    def __call__(self, x: Picture) -> Picture:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(layers.activate(self.conv_norm_out, self.mid_block(x)))


def block_widths(widths: Sequence[int], num_resnets: int) -> list[tuple[int, ...]]:
    """Returns the widths inside each block: its input, then the output of each resnet."""
    before = (widths[0], *widths)
    return [(first, *[width] * num_resnets) for first, width in zip(before, widths)]
