"""Tokens of several requests packed into one launch, whose K,V go into the paged pool.

A request's part may be padded to whole tiles. Shapes depend on the bucket alone; the arrays are
numpy's on the host and traced in the launch, hence `Any` in their types.

Letters: R rows, T packed tokens, M pages of the longest row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jdllm.layers import attention
from jdllm.runner import paging
from jdllm.runner.config import StepConfig
from jdllm.scheduler import sizes
from jdllm.scheduler.batch import ScheduleBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """Committed tokens of several requests; `cu_q_lens` counts the padding of tiles, too.

    `kv_lens` is the context with the tokens of the launch, 0 for padding rows.
    """

    tokens: Int32[Any, " T"]
    cu_q_lens: Int32[Any, " R+1"]
    context_lens: Int32[Any, " R"]
    kv_lens: Int32[Any, " R"]
    page_table: Int32[Any, "R M"]


def pack(batch: ScheduleBatch, config: StepConfig, *, tile: int = 1) -> PackedInputs:
    """Packs the rows' committed tokens, each row in whole tiles, and pads to the bucket."""
    R, T = batch.bucket.rows, batch.bucket.tokens
    tokens = np.zeros((T,), np.int32)
    cu_q_lens = np.zeros((R + 1,), np.int32)
    context_lens, kv_lens = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
    at = 0
    for i, row in enumerate(batch.rows):
        end = row.start + row.num_tokens
        tokens[at : at + row.num_tokens] = row.request.tokens(row.start, end)
        at += sizes.in_units(row.num_tokens, tile)
        cu_q_lens[i + 1 :] = at
        context_lens[i], kv_lens[i] = row.start, end
    return PackedInputs(
        tokens=tokens,
        cu_q_lens=cu_q_lens,
        context_lens=context_lens,
        kv_lens=kv_lens,
        page_table=paging.page_table(batch, config),
    )


def paged_batch(
    config: StepConfig, inputs: PackedInputs
) -> tuple[attention.PagedBatch, Int32[Array, " T"], Bool[Array, " T"]]:
    """Returns the batch that attention takes, the tokens' positions, and which are no padding."""
    T, R = inputs.tokens.shape[0], inputs.kv_lens.shape[0]
    index = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(inputs.cu_q_lens, index, side="right").astype(jnp.int32) - 1
    is_packed = index < inputs.cu_q_lens[R]
    row = jnp.clip(row, 0, R - 1)
    positions = inputs.context_lens[row] + index - inputs.cu_q_lens[row]
    is_valid = is_packed & (positions < inputs.kv_lens[row])
    positions = jnp.where(is_valid, positions, 0)
    batch = attention.PagedBatch(
        cu_q_lens=inputs.cu_q_lens,
        context_lens=inputs.context_lens,
        kv_lens=inputs.kv_lens,
        page_table=inputs.page_table,
        kv_indices=paging.kv_indices(config, inputs.page_table, row, positions, is_valid),
    )
    return batch, positions, is_valid
