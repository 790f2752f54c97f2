"""Sums over the ranks of a mesh, alone and with the residual add and RMSNorm after them.

`reference.py` uses XLA's collectives, which keep a loop out of a CUDA graph. The kernel in
`mosaic_gpu.py` writes to the peers' memory, and needs their buffers (`peers.py`).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.add_rms_norm import api, checks
from pallas_kernels.all_reduce import mosaic_gpu, reference
from pallas_kernels.peers import NO_BUFFERS, Peers


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    tokens: int,
    width: int,
    peers: Peers | None,
) -> dispatch.Choice:
    """Returns which implementation of `all_reduce` serves this shape."""
    reason = NO_BUFFERS
    if peers is not None:
        reason = mosaic_gpu.why_not(dtype=dtype, tokens=tokens, width=width, peers=peers)
    return dispatch.choose("all_reduce", implementation, refusals={"mosaic_gpu": reason})


def all_reduce(
    added: tuple[Float[Array, "T D"], ...],  # at least one
    *,
    axis_name: str,
    peers: Peers | None = None,
    implementation: str = "auto",
) -> Float[Array, "T D"]:
    """Returns the sum of `added` over all ranks of a `shard_map`, the same bits on each.

    The arrays of one rank are summed first, rounded to the dtype after every addition; the sums of
    the ranks in rank order in float32, rounded once.
    """
    shape, dtype = added[0].shape, added[0].dtype
    rows, width = shape
    part = rows
    if peers is not None:
        width = mosaic_gpu.width_of_rows(rows, width, peers)
        rows = rows * shape[1] // width
        part = min(rows, peers.rows)  # more go one part after another
    chosen = choose(implementation, dtype=dtype, tokens=part, width=width, peers=peers)
    if chosen.implementation == "mosaic_gpu":
        cut = [one.reshape(rows, width) for one in added]
        sums = [
            _all_reduce(tuple(one[begin : begin + part] for one in cut), peers)
            for begin in range(0, rows, part)
        ]
        return (sums[0] if len(sums) == 1 else jnp.concatenate(sums)).reshape(shape)
    return reference.all_reduce(functools.reduce(jnp.add, added), axis_name)


def all_reduce_add_rms_norm(
    x: Float[Array, "T D"],
    added: tuple[Float[Array, "T D"], ...],  # at least one
    weight: Float[Array, " D"],
    *,
    eps: float,
    axis_name: str,
    peers: Peers | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns (x + the `all_reduce` of added, rms_norm of that); x is equal on all ranks.

    `implementation` is that of `add_rms_norm` too, where the two are not one kernel.
    """
    checks.check_shapes(x, added, weight)
    tokens, width = x.shape
    chosen = choose(implementation, dtype=x.dtype, tokens=tokens, width=width, peers=peers)
    if chosen.implementation == "mosaic_gpu":
        return _all_reduce_add_rms_norm(x, added, weight, peers, eps=eps)
    total = reference.all_reduce(functools.reduce(jnp.add, added), axis_name)
    return api.add_rms_norm(x, (total,), weight, eps=eps, implementation=implementation)


@jax.jit
def _all_reduce(added, peers) -> jax.Array:
    return lowered_once.call(mosaic_gpu.all_reduce, added, peers)


@functools.partial(jax.jit, static_argnames=("eps",))
def _all_reduce_add_rms_norm(x, added, weight, peers, *, eps) -> tuple[jax.Array, jax.Array]:
    weight = weight.astype(x.dtype)
    return lowered_once.call(mosaic_gpu.all_reduce_add_rms_norm, x, added, weight, peers, eps=eps)
