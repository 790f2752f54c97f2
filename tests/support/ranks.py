"""Ranks whose memories an interpreted kernel reaches by the upper half of an address."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.peers import Peers, buffer_words


def peers(ranks: int, *, rows: int, width: int, chunks: int = 1) -> Peers:
    """Returns shapes of what a kernel gets; `width` is that of a bfloat16 row."""
    return Peers(
        rank=jax.ShapeDtypeStruct((1,), jnp.int32),
        addresses=jax.ShapeDtypeStruct((ranks, 2), jnp.int32),
        axis_name="tp",
        rows=rows,
        row_bytes=2 * width,
        chunks=chunks,
    )


def buffers(of: Peers) -> dict[int, np.ndarray]:
    """Returns the buffer of each rank, by the upper half of its address."""
    size = buffer_words(ranks=of.num_ranks, rows=of.rows, row_bytes=of.row_bytes, chunks=of.chunks)
    return {rank + 1: np.zeros(size, np.uint32) for rank in range(of.num_ranks)}


def addresses(of: Peers) -> np.ndarray:
    """Returns the addresses as kernels get them, flat."""
    return np.array([[0, rank + 1] for rank in range(of.num_ranks)], np.uint32).ravel()
