"""Where the tokens of a launch lie in the paged KV pool: page tables, and places of new K,V."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.runner import config as config_lib
from jdllm.scheduler import batch as batch_lib


def page_table(batch: batch_lib.ScheduleBatch, config: config_lib.StepConfig) -> np.ndarray:
    """Returns int32 [R, M], the pages of each row, 0 where it has none."""
    table = np.zeros((batch.bucket.rows, config.pages_per_row), np.int32)
    for i, row in enumerate(batch.rows):
        table[i, : len(row.stay.pages)] = row.stay.pages
    return table


def kv_indices(
    config: config_lib.StepConfig,
    page_table: jax.Array,
    row: jax.Array,
    positions: jax.Array,
    is_valid: jax.Array,
) -> jax.Array:
    """Returns [T] places in the pool; those of padding are distinct and past it, thus dropped."""
    page_size = config.pool.page_size
    page = page_table[row, positions // page_size]
    index = page * page_size + positions % page_size
    beyond = config.pool.num_pages * page_size + jnp.arange(positions.shape[0], dtype=jnp.int32)
    return jnp.where(is_valid, index, beyond)
