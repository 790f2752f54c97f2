"""Windows of ragged rows, one after the other in a vector of tokens of a compiled size."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm.decoding.canvas import interface as canvas
from jdllm.scheduler.rows import canvas as canvas_rows

SEGMENT = canvas_rows.ALIGNMENT  # tokens; the scheduler admits rows by it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the rows' windows lie in a vector of T tokens."""

    cu_q_lens: jax.Array  # [R + 1]
    row: jax.Array  # [T]
    positions: jax.Array  # [T]
    is_valid: jax.Array  # [T]

    def any_of_row(self, of_token: jax.Array) -> jax.Array:
        """Returns [R]: whether `of_token` [T] holds for any of the row's tokens."""
        rows = jnp.arange(self.cu_q_lens.shape[0] - 1, dtype=jnp.int32)[:, None]
        return jnp.any((self.row == rows) & self.is_valid & of_token, axis=1)


def segments(window: canvas.Window) -> jax.Array:
    """Returns [R] the tokens that the rows take in the vector."""
    return (window.high - window.low + SEGMENT - 1) // SEGMENT * SEGMENT


def pack(window: canvas.Window, size: int) -> Packing:
    """Returns the packing of the windows in `size` tokens."""
    R = window.low.shape[0]
    rows, index = jnp.arange(R, dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)
    # There are few rows, so adding and counting all of them takes no kernel of its own where a scan
    # or a search does. Rows lead: over the last axis XLA would give these sums a kernel.
    ends = jnp.sum(jnp.where(rows[:, None] <= rows, segments(window)[:, None], 0), axis=0)
    cu_q_lens = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    row = jnp.minimum(jnp.sum(index >= ends[:, None], axis=0, dtype=jnp.int32), R - 1)
    positions = window.low[row] + index - cu_q_lens[row]
    is_valid = (index < cu_q_lens[R]) & (positions < window.high[row])
    return Packing(
        cu_q_lens=cu_q_lens,
        row=row,
        positions=jnp.where(is_valid, positions, 0),
        is_valid=is_valid,
    )
