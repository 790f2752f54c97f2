"""Selects rows in trees of arrays whose first dimension is R, the rows."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")  # of arrays [R, ...]


def select(where: Bool[Array, " R"], new: Tree, old: Tree) -> Tree:
    """Returns `new` for the rows of `where`, `old` for the others."""
    return jax.tree.map(
        lambda a, b: jnp.where(where.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), new, old
    )
