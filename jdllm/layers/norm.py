"""Norms: statistics in float32, and the multiplication by a weight in the activation dtype."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from jdllm.device import sharding


class RMSNorm(nnx.Module):
    """Normalises the last axis of size `dim` to unit root mean square.

    With `num_ranks`, `add` and `of_sum` run in a shard_map, and each rank has a part of the sum.
    """

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype, num_ranks: int = 1):
        self.eps = eps
        self.num_ranks = num_ranks
        self.weight = nnx.Param(jnp.ones((dim,), dtype))

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return pallas_kernels.rms_norm(x, self.weight[...], self.eps)

    def of_sum(self, parts: tuple[Float[Array, "T dim"], ...]) -> Float[Array, "T dim"]:
        """Returns the norm of the sum of the `parts` of all ranks."""
        return self(functools.reduce(jnp.add, sum_of_parts(parts, self.num_ranks)))

    def add(
        self,
        x: Float[Array, "T D"],
        added: tuple[Float[Array, "T D"], ...],
        *,
        implementation: str = "auto",
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Returns (x + sum(added), the norm of that sum), with `added` of all ranks."""
        weight, eps = self.weight[...], self.eps
        if self.num_ranks == 1:
            return pallas_kernels.add_rms_norm(
                x, added, weight, eps=eps, implementation=implementation
            )
        return pallas_kernels.all_reduce_add_rms_norm(
            x, added, weight, eps=eps, axis_name=sharding.AXIS, peers=sharding.peers(),
            implementation=implementation,
        )  # fmt: skip


def sum_of_parts(
    added: tuple[Float[Array, "T D"], ...], num_ranks: int
) -> tuple[Float[Array, "T D"], ...]:
    """Returns arrays that have the same sum on every rank: that of the arrays of all ranks."""
    if num_ranks == 1:
        return added
    return (pallas_kernels.all_reduce(added, axis_name=sharding.AXIS, peers=sharding.peers()),)


def layer_norm(x: Float[Array, "... D"], *, eps: float) -> Float[Array, "... D"]:
    """Returns `x` with mean 0 and variance 1 over its last axis, without weights."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalises the last axis of size `dim` to mean 0 and variance 1, then weight and bias."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return layer_norm(x, eps=self.eps) * self.weight[...] + self.bias[...]
