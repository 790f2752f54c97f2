"""RMSNorm: statistics in float32, and the multiplication by the weight in the activation dtype."""

from __future__ import annotations

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
