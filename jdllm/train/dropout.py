"""Dropout on the embeddings and the residual branches, for training only.

The model's code knows nothing of it: the training step wraps the hooks that it passes to the model.
A serving step cannot drop anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

LEVELS = 256  # one random byte per activation costs a quarter of a random float


@dataclasses.dataclass(slots=True)
class Dropout:
    """Drops a share of the activations of one forward pass; each call draws anew."""

    share: float
    key: PRNGKeyArray
    _calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """Returns `x` with zeros in random places, and scaled so that its mean stays."""
        kept = LEVELS - round(LEVELS * self.share)
        key = jax.random.fold_in(self.key, next(self._calls))
        draws = jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.int32)
        return jnp.where(draws < kept, x * jnp.asarray(LEVELS / kept, x.dtype), 0)
