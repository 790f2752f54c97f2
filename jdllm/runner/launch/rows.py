"""Trees of arrays that lead with rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def select(where: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` for the rows of `where` [R], `old` for the others."""
    return jax.tree.map(
        lambda a, b: jnp.where(where.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), new, old
    )
