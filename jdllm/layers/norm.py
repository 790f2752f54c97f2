"""RMSNorm: statistics in float32, the weight applied in the activation dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels


class RMSNorm(nnx.Module):
    """Normalises the last axis of size `dim` to unit root mean square."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((dim,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return pallas_kernels.rms_norm(x, self.weight[...], self.eps)

    def add(
        self, x: jax.Array, added: tuple[jax.Array, ...], *, implementation: str = "auto"
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (x + sum(added), the norm of that), both [T, D]."""
        return pallas_kernels.add_rms_norm(
            x, added, self.weight[...], eps=self.eps, implementation=implementation
        )
