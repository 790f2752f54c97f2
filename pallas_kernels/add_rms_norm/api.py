"""RMSNorm, alone and fused with the additions before it, and rotary positions.

Statistics and rotation are float32; the normalised value is cast to the activation dtype before
it is multiplied by the weight, as LLaDA2 and the Qwen-style families do (visible at bf16 rounding
level). Kernels keep every rounding of these references.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.add_rms_norm import mosaic_gpu as norm_kernel


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns `x / rms(x) * weight` over the last axis, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first `2 * cos.shape[-1]` dims of every head of `x` [T, N, H].

    Dim j of the rotated dims pairs with j + rotary_dim / 2; one cast at the end.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def choose_add_rms_norm(
    implementation: str = "auto", *, dtype: jnp.dtype, width: int
) -> dispatch.Choice:
    """Returns which implementation of `add_rms_norm` serves this shape."""
    reason = norm_kernel.why_not(dtype=dtype, width=width)
    return dispatch.choose("add_rms_norm", implementation, refusals={"mosaic_gpu": reason})


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def add_rms_norm(
    x: jax.Array,  # [T, D]
    added: tuple[jax.Array, ...],  # [T, D] each, at least one
    weight: jax.Array,  # [D]
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns (x + sum(added), rms_norm of that), both [T, D]; all of one dtype.

    What is added is summed first, and every addition rounds to the dtype.
    """
    wrong = [part for part in added if part.shape != x.shape or part.dtype != x.dtype]
    if x.ndim != 2 or not added or wrong or weight.shape != x.shape[1:]:
        raise ValueError(
            f"add_rms_norm: x and all that is added must be [T, D] of one dtype and weight [D]: "
            f"x {x.dtype}{x.shape}, added {[f'{a.dtype}{a.shape}' for a in added]}, "
            f"weight {weight.shape}"
        )
    chosen = choose_add_rms_norm(implementation, dtype=x.dtype, width=x.shape[1])
    if chosen.implementation == "mosaic_gpu":
        weight = weight.astype(x.dtype)
        return lowered_once.call(norm_kernel.add_rms_norm, x, added, weight, eps=eps)
    total = x + functools.reduce(jnp.add, added)
    return total, rms_norm(total, weight, eps)
