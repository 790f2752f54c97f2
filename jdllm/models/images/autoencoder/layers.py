"""Layers over pictures [B, H, W, C], as the autoencoders of Flux and of Qwen-Image have them.

Channels come last: convolutions of this layout are several times faster on a GPU. They run in the
dtype of the weights. Norms and the activation after them are float32; one cast follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jdllm.models.images.autoencoder import products

# At most so many logits of a picture exist at once (64 MiB in float32). 512 x 512 pixels have just
# as many; larger pictures take their queries in turns.
MOST_LOGITS = 2**24
_EPS = 1e-6
_LEAST_LENGTH = 1e-12

Picture = Float[Array, "B H W C"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and variance of each group of channels, float32, and the number of positions."""

    mean: Float32[Array, "*parts B groups"]
    variance: Float32[Array, "*parts B groups"]
    positions: Float32[Array, "*parts"]

    def pooled(self) -> Moments:
        """Returns the moments of all parts (the first axis) together."""
        positions = self.positions.sum()
        share = (self.positions / positions)[:, None, None]
        mean = (share * self.mean).sum(0)
        variance = (share * (self.variance + jnp.square(self.mean - mean))).sum(0)
        return Moments(mean=mean, variance=variance, positions=positions)


class GroupNorm(nnx.Module):
    """Normalises each group of channels over all positions of a picture, eps 1e-6."""

    def __init__(self, channels: int, groups: int, dtype: jnp.dtype):
        self.groups = groups
        self.weight = nnx.Param(jnp.ones((channels,), dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype))

    def __call__(self, x: Picture, moments: Moments | None = None) -> Float32[Array, "B H W C"]:
        """Returns the normalised picture. `moments` replaces those of `x`."""
        moments = self.moments(x) if moments is None else moments
        per_group = x.shape[-1] // self.groups
        factor = jax.lax.rsqrt(moments.variance + _EPS)
        mean, factor = (
            jnp.repeat(each, per_group, axis=-1)[:, None, None] for each in (moments.mean, factor)
        )  # [B, 1, 1, C]
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (x.astype(jnp.float32) - mean) * (factor * weight) + bias

    def moments(self, x: Picture, counted: Float32[Array, "H W"] | None = None) -> Moments:
        """Returns the moments over the positions where `counted` is 1, or over all."""
        B, H, W, C = x.shape
        # The sums of one pass lose digits if the mean is far from 0; it is near any pixel.
        pixel = x[:, H // 2, W // 2].astype(jnp.float32)  # [B, C]
        centred = x.astype(jnp.float32) - pixel[:, None, None]
        weighted = centred if counted is None else centred * counted[:, :, None]
        positions = jnp.float32(H * W) if counted is None else counted.sum()
        shift = weighted.sum((1, 2)) / positions  # [B, C]
        spread = (weighted * centred).sum((1, 2)) / positions - jnp.square(shift)
        means = (pixel + shift).reshape(B, self.groups, -1)
        mean = means.mean(-1)
        variance = spread.reshape(means.shape) + jnp.square(means - mean[..., None])
        variance = jnp.maximum(variance.mean(-1), 0)
        return Moments(mean=mean, variance=variance, positions=positions)


class ChannelNorm(nnx.Module):
    """Gives the channels of each position unit root mean square, without a mean or an eps."""

    def __init__(self, channels: int, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((channels,), dtype))

    def __call__(self, x: Picture) -> Float32[Array, "B H W C"]:
        """Returns the normalised picture."""
        x = x.astype(jnp.float32)
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
        x = x / jnp.maximum(length, _LEAST_LENGTH) * x.shape[-1] ** 0.5
        return x * self.weight[...].astype(jnp.float32)


Norm = GroupNorm | ChannelNorm
# activate(norm, x): SiLU of the normalised picture, in the dtype of x.
Activate = Callable[[Norm, Picture], Picture]


def norm_of(channels: int, groups: int | None, dtype: jnp.dtype) -> Norm:
    """Returns a norm of groups of channels; without groups, one of each position."""
    if groups is None:
        return ChannelNorm(channels, dtype)
    return GroupNorm(channels, groups, dtype)


def activate(norm: Norm, x: Picture) -> Picture:
    """Returns SiLU of the normalised picture, with the picture's own moments."""
    return jax.nn.silu(norm(x)).astype(x.dtype)


class Conv(nnx.Module):
    """A square convolution with bias; the result keeps the size unless `stride` is larger.

    With stride 2, one row and one column of zeros are added behind the picture, none before it.
    `has_fast_gradient` computes it as `products` does.
    """

    has_fast_gradient = False

    def __init__(
        self, channels: int, out_channels: int, dtype: jnp.dtype, *, size: int = 3, stride: int = 1
    ):
        self.stride = stride
        self.padding = (0, size // 2) if stride > 1 else (size // 2, size // 2)
        self.kernel = nnx.Param(jnp.zeros((size, size, channels, out_channels), dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))

    def __call__(self, x: Picture) -> Picture:
        kernel = self.kernel[...]
        if self.has_fast_gradient:
            return products.convolve(x, kernel, self.stride, self.padding) + self.bias[...]
        out = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=(self.padding, self.padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return out + self.bias[...]


class Upsampler(nnx.Module):
    """Doubles both sides: each pixel four times, then a convolution."""

    def __init__(self, channels: int, out_channels: int, dtype: jnp.dtype):
        self.conv = Conv(channels, out_channels, dtype)

    def __call__(self, x: Picture) -> Picture:
        B, H, W, C = x.shape
        doubled = jnp.broadcast_to(x[:, :, None, :, None], (B, H, 2, W, 2, C))
        return self.conv(doubled.reshape(B, 2 * H, 2 * W, C))


class Downsampler(nnx.Module):
    """Halves both sides by a convolution with stride 2."""

    def __init__(self, channels: int, dtype: jnp.dtype):
        self.conv = Conv(channels, channels, dtype, stride=2)

    def __call__(self, x: Picture) -> Picture:
        return self.conv(x)


class Resnet(nnx.Module):
    """Two convolutions, each after norm and SiLU, added to the input."""

    def __init__(self, channels: int, out_channels: int, groups: int | None, dtype: jnp.dtype):
        self.norm1 = norm_of(channels, groups, dtype)
        self.conv1 = Conv(channels, out_channels, dtype)
        self.norm2 = norm_of(out_channels, groups, dtype)
        self.conv2 = Conv(out_channels, out_channels, dtype)
        is_wider = channels != out_channels
        self.conv_shortcut = Conv(channels, out_channels, dtype, size=1) if is_wider else None

    def __call__(self, x: Picture, activate: Activate = activate) -> Picture:
        hidden = self.conv1(activate(self.norm1, x))
        hidden = self.conv2(activate(self.norm2, hidden))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Every position attends every position, in one head of all channels; added to the input."""

    def __init__(self, channels: int, groups: int | None, dtype: jnp.dtype):
        # Named as published checkpoints of Flux have it, and so converted ones.
        self.group_norm = norm_of(channels, groups, dtype)
        self.w_qkv = nnx.Param(jnp.zeros((3 * channels, channels), dtype))
        self.b_qkv = nnx.Param(jnp.zeros((3 * channels,), dtype))
        self.w_out = nnx.Param(jnp.zeros((channels, channels), dtype))
        self.b_out = nnx.Param(jnp.zeros((channels,), dtype))

    def __call__(self, x: Picture) -> Picture:
        B, H, W, C = x.shape
        normed = self.group_norm(x).astype(x.dtype).reshape(B, H * W, C)
        qkv = jnp.einsum("BTC,DC->BTD", normed, self.w_qkv[...]) + self.b_qkv[...]
        q, k, v = (each[:, :, None] for each in jnp.split(qkv, 3, axis=-1))  # [B, T, 1, C]
        out = _attend(q, k, v).reshape(B, H * W, C)
        out = jnp.einsum("BTC,DC->BTD", out, self.w_out[...]) + self.b_out[...]
        return x + out.reshape(B, H, W, C)


def _attend(
    q: Float[Array, "B T 1 C"], k: Float[Array, "B T 1 C"], v: Float[Array, "B T 1 C"]
) -> Float[Array, "B T 1 C"]:
    # cuDNN's attention takes heads of at most 256 channels; published models have 512.
    def attend(queries: Array) -> Array:
        return jax.nn.dot_product_attention(queries, k, v, implementation="xla")

    B, T, N, C = q.shape
    turns = -(-T * T // MOST_LOGITS)
    if turns == 1:
        return attend(q)
    size = -(-T // turns)

    def of_turn(first: Array) -> Array:
        # The last query fills up the last turn. Queries are gathered, not sliced: XLA for GPUs
        # copies moving slices on its own account, and a loop with such copies is no CUDA graph.
        ids = first + jnp.arange(size, dtype=jnp.int32)
        return attend(q.at[:, ids].get(mode="clip"))

    out = jax.lax.map(of_turn, jnp.arange(0, T, size, dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, N, C)[:, :T]


class MidBlock(nnx.Module):
    """Resnet, attention unless the config leaves it out, resnet; at the size of the latents."""

    def __init__(self, channels: int, groups: int | None, dtype: jnp.dtype, *, has_attention: bool):
        self.resnets = nnx.List([Resnet(channels, channels, groups, dtype) for _ in range(2)])
        attentions = [Attention(channels, groups, dtype)] if has_attention else []
        self.attentions = nnx.List(attentions)

    def __call__(self, x: Picture) -> Picture:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)
