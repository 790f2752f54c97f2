"""The embedding of a timestep in transformers for images."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from jdllm.layers import linear

NUM_SINUSOIDS = 256
_LONGEST_PERIOD = 10_000


def sinusoids(timesteps: Float32[Array, " B"]) -> Float32[Array, "B 256"]:
    """Returns cosines, then sines, of 128 frequencies from 1 down to almost 1 / 10000."""
    half = NUM_SINUSOIDS // 2
    frequencies = np.exp(-math.log(_LONGEST_PERIOD) / half * np.arange(half)).astype(np.float32)
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class TimestepEmbedder(nnx.Module):
    """Two linear layers with SiLU between them, over sinusoids.

    All of it is float32, whatever the weights are: in bfloat16 the timesteps 600 and 601 are one.
    """

    def __init__(self, width: int, num_outputs: int, *, dtype: jnp.dtype):
        self.linear_1 = linear.Linear(NUM_SINUSOIDS, width, dtype=dtype)
        self.linear_2 = linear.Linear(width, num_outputs, dtype=dtype)

    def __call__(self, timesteps: Float32[Array, " B"]) -> Float32[Array, "B F"]:
        """Returns the embeddings of timesteps, which count up to about 1000."""
        return self.linear_2(jax.nn.silu(self.linear_1(sinusoids(timesteps))))
