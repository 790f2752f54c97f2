"""RMSNorm: statistics in float32, the weight applied in the activation dtype.

LLaDA2 and the Qwen-style families cast the normalised value before they
multiply by the weight; the order is visible at bf16 rounding level.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns `x / rms(x) * weight` over the last axis, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Normalises the last axis of size `dim` to unit root mean square."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((dim,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)
