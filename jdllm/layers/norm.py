"""Norms: statistics in float32, and the multiplication by a weight in the activation dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels


class RMSNorm(nnx.Module):
    """Normalises the last axis of size `dim` to unit root mean square."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((dim,), dtype))

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return pallas_kernels.rms_norm(x, self.weight[...], self.eps)

    def add(
        self,
        x: Float[Array, "T D"],
        added: tuple[Float[Array, "T D"], ...],
        *,
        implementation: str = "auto",
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Returns (x + sum(added), the norm of that sum)."""
        return pallas_kernels.add_rms_norm(
            x, added, self.weight[...], eps=self.eps, implementation=implementation
        )


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
