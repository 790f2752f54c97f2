"""Sums over ranks by XLA's collectives."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def all_reduce(x: Shaped[Array, "*shape"], axis_name: str) -> Shaped[Array, "*shape"]:
    """Returns the sum of every rank's array, in float32 and rounded once: the same bits everywhere.

    The sum of two numbers has no order. For more ranks the library's sum may start at each rank's
    own place, so the parts are gathered, and added in rank order.
    """
    ranks = lax.axis_size(axis_name)
    if ranks == 2:
        return lax.psum(x, axis_name)
    parts: jax.Array = lax.all_gather(x, axis_name)
    total = functools.reduce(jnp.add, [parts[rank].astype(jnp.float32) for rank in range(ranks)])
    return total.astype(x.dtype)
