"""RMSNorm, alone and after additions, by XLA.

Statistics are float32; the normalised value is cast to the activation dtype before it is multiplied
by the weight, as LLaDA2 and the Qwen-style families do (visible at bf16 rounding level).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_rms_norm(
    x: Float[Array, "T D"],
    added: tuple[Float[Array, "T D"], ...],
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns (x + sum(added), rms_norm of that); `added` is summed first."""
    total = x + functools.reduce(jnp.add, added)
    return total, rms_norm(total, weight, eps)


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*rows D"]:
    """Returns `x / rms(x) * weight` over the last axis, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)
