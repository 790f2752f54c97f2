"""Packs the windows of ragged rows one after the other into a vector of tokens of a compiled size.

Letters: R rows, T packed tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jdllm.decoding.canvas.interface import Window
from jdllm.scheduler.rows import canvas as canvas_rows

SEGMENT = canvas_rows.ALIGNMENT  # in tokens; the scheduler counts with it when it admits rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the rows' windows lie in the vector of tokens."""

    cu_q_lens: Int32[Array, " R+1"]
    row: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    is_valid: Bool[Array, " T"]

    def any_of_row(self, of_token: Bool[Array, " T"]) -> Bool[Array, " R"]:
        """Returns whether `of_token` is true for any token of a row."""
        rows = jnp.arange(self.cu_q_lens.shape[0] - 1, dtype=jnp.int32)[:, None]
        return jnp.any((self.row == rows) & self.is_valid & of_token, axis=1)


def segments(window: Window) -> Int32[Array, " R"]:
    """Returns how many tokens of the vector each row takes."""
    return (window.high - window.low + SEGMENT - 1) // SEGMENT * SEGMENT


def pack(window: Window, size: int) -> Packing:
    """Returns the packing of the windows in `size` tokens."""
    R = window.low.shape[0]
    rows, index = jnp.arange(R, dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)
    # There are few rows, so sums over all of them need no kernel of their own; a scan or a search
    # would. The rows are the first axis: for sums over the last axis XLA would add a kernel.
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
