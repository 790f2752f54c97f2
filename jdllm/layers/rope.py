"""Angles of rotary positions; `pallas_kernels.apply_rope` rotates by them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one kind of layers: rotated dims of a head, base of the frequencies."""

    rotary_dim: int
    theta: float


def rope_angles(
    positions: jax.Array, *, rotary_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (cos, sin), each [T, rotary_dim / 2], for integer positions [T]."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angles = positions.astype(jnp.float32)[:, None] * (theta**-exponent)[None, :]
    return jnp.cos(angles), jnp.sin(angles)
