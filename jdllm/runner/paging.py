"""Where the tokens of a launch lie in the paged KV pool: page tables, and places of new K,V.

Letters: R rows, T tokens, M pages of the longest row.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jdllm.runner.config import StepConfig
from jdllm.scheduler.batch import ScheduleBatch


def page_table(batch: ScheduleBatch, config: StepConfig) -> Int32[np.ndarray, "R M"]:
    """Returns the pages of each row, 0 where it has none."""
    table = np.zeros((batch.bucket.rows, config.pages_per_row), np.int32)
    for i, row in enumerate(batch.rows):
        table[i, : len(row.stay.pages)] = row.stay.pages
    return table


def kv_indices(
    config: StepConfig,
    page_table: Int32[Array, "R M"],
    row: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    is_valid: Bool[Array, " T"],
) -> Int32[Array, " T"]:
    """Returns the places of tokens in the pool; padding gets distinct ones past it (dropped)."""
    page_size = config.pool.page_size
    page = page_table[row, positions // page_size]
    index = page * page_size + positions % page_size
    beyond = config.pool.num_pages * page_size + jnp.arange(positions.shape[0], dtype=jnp.int32)
    return jnp.where(is_valid, index, beyond)
