"""Rotary positions with several axes, as transformers for images have them.

A token has one position per axis (such as frame, row, column). Each axis rotates its own part of a
head; the parts stand side by side. Neighbouring dims are a pair (2i, 2i + 1), unlike in
`layers/rope.py`, where a pair is half a head apart.

Letters: those of the whole project, and A axes. Angles are float32 in every dtype of the model:
bfloat16 cannot even count to 300.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

CosSin = tuple[Float32[Array, "B T H/2"], Float32[Array, "B T H/2"]]


def angles(
    positions: Int[Array | np.ndarray, "B T A"], *, axes_dims: Sequence[int], theta: float
) -> CosSin:
    """Returns (cos, sin) of the angle of every pair; axis a has `axes_dims[a]` dims of a head.

    Pair i of an axis with d dims turns by `theta ** (-2i / d)` per position.
    """
    if len(axes_dims) != positions.shape[-1]:
        raise ValueError(f"{positions.shape=} has not the {len(axes_dims)} axes of {axes_dims=}")
    frequencies = (theta ** -(np.arange(0, dim, 2) / dim) for dim in axes_dims)  # float64
    by_axis = [
        jnp.asarray(positions[..., axis, None], jnp.float32) * frequency.astype(np.float32)
        for axis, frequency in enumerate(frequencies)
    ]
    turned = jnp.concatenate(by_axis, axis=-1)
    return jnp.cos(turned), jnp.sin(turned)


def rotate_pairs(x: Float[Array, "B T N H"], cos_sin: CosSin) -> Float[Array, "B T N H"]:
    """Returns `x` with every pair of every head rotated, in float32 with one cast at the end."""
    cos, sin = (part[:, :, None, :, None] for part in cos_sin)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    # (a, b) turns by 90 degrees to (-b, a).
    turned = jnp.flip(pairs, axis=-1) * jnp.array([-1.0, 1.0])
    return (pairs * cos + turned * sin).reshape(x.shape).astype(x.dtype)
