"""Rotary positions in the half-split form that every supported family uses.

Dim j of the first `rotary_dim` dims pairs with j + rotary_dim / 2; further dims
pass through. Angles and rotation are float32, with one cast at the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_angles(
    positions: jax.Array, *, rotary_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (cos, sin), each [T, rotary_dim / 2], for integer positions [T]."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angles = positions.astype(jnp.float32)[:, None] * (theta**-exponent)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first `2 * cos.shape[-1]` dims of every head of `x` [T, N, H]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
