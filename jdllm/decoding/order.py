"""The order of positions by a score, for the rules of every kind of rows.

Letters: R rows, S positions of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def ranks(score: Float[Array, "R S"], eligible: Bool[Array, "R S"]) -> Int32[Array, "R S"]:
    """Returns how many eligible positions come before each position.

    The order is by falling score, then by rising position. A position that is not eligible gets
    S. The function compares all pairs, because a sort cannot run inside a loop on the device.
    """
    S = score.shape[1]
    place = jnp.arange(S, dtype=jnp.int32)
    higher = score[:, None, :] > score[:, :, None]
    earlier = (score[:, None, :] == score[:, :, None]) & (place[None, :] < place[:, None])
    # XLA may compute the two sides of the comparison in different ways. A score that rounds
    # differently must not be higher than itself, or nothing would have rank 0.
    other = place[None, :] != place[:, None]
    before = jnp.sum(eligible[:, None, :] & (higher & other | earlier), axis=2, dtype=jnp.int32)
    return jnp.where(eligible, before, S)
