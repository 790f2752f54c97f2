"""Angles of rotary positions; `pallas_kernels.apply_rope` rotates by them.

Letters: those of the whole project, and A angles, half of the rotated dims of a head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

CosSin = tuple[Float32[Array, "T A"], Float32[Array, "T A"]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one kind of layer: the rotated dims of a head, and the frequency base.

    With `num_turning`, only so many pairs of dims turn, those of the highest frequencies; the
    frequency of the others is 0 ("proportional" in Hugging Face's configs).
    """

    rotary_dim: int
    theta: float
    num_turning: int | None = None


def rope_angles(
    positions: Int[Array, " T"], *, rotary_dim: int, theta: float, num_turning: int | None = None
) -> CosSin:
    """Returns (cos, sin) of the angles by which q and k at these positions are rotated."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    times = positions.astype(jnp.float32)[:, None]
    frequency = theta**-exponent
    if num_turning is not None:
        frequency = jnp.where(jnp.arange(rotary_dim // 2) < num_turning, frequency, 0.0)
    angles = times * frequency[None, :]
    return jnp.cos(angles), jnp.sin(angles)
