"""Images of autoencoders, about -1 to 1, as pixels: floats from 0 to 1, or 8 bits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8


def to_uint8(images: Float32[Array, "B H W 3"]) -> UInt8[Array, "B H W 3"]:
    """Returns pixels 0 to 255 of images -1 to 1: clipped, then rounded half to even."""
    return jnp.round(255 * to_float(images)).astype(jnp.uint8)


def to_float(images: Float32[Array, "B H W 3"]) -> Float32[Array, "B H W 3"]:
    """Returns pixels 0 to 1 of images -1 to 1: clipped."""
    return jnp.clip(images / 2 + 0.5, 0, 1)
