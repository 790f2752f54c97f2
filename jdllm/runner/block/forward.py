"""The forwards that block launches run: whole committed blocks, or one block of each row.

`prefill_step` writes K,V of committed blocks and returns the pool; `step_forward` is
the forward of a denoising step (`loop.py`). The pool is a list that the caller donates.
Both use the same attention op: it first writes K,V of the in-flight tokens, then attends.

A forward reads the weights once, and for each row and layer K,V of the row's `context +
in-flight` tokens once; a denoising step also streams the vocabulary once.

Letters: R rows, L tokens of a block, T packed tokens, M pages of the longest row.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jdllm.layers import attention
from jdllm.models import decoder, loading
from jdllm.runner import config as config_lib
from jdllm.runner import paging
from jdllm.runner.block import inputs as inputs_lib
from jdllm.runner.block import state as state_lib
from jdllm.runner.launch import program


def prefill_step(
    graphdef: nnx.GraphDef,
    config: config_lib.StepConfig,
    params: program.Params,
    memory: program.Memory,
    inputs: inputs_lib.PrefillInputs,
) -> tuple[program.Memory, Int32[Array, ""]]:
    """Returns the pool with K,V of the packed tokens written, and the number of tokens.

    The host waits for the number, since the pool is donated to the next launch. No LM head runs.
    """
    T, R = inputs.tokens.shape[0], inputs.kv_lens.shape[0]
    index = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(inputs.cu_q_lens, index, side="right").astype(jnp.int32) - 1
    is_valid = index < inputs.cu_q_lens[R]
    row = jnp.clip(row, 0, R - 1)
    positions = inputs.context_lens[row] + index - inputs.cu_q_lens[row]
    positions = jnp.where(is_valid, positions, 0)
    batch = attention.PagedBatch(
        cu_q_lens=inputs.cu_q_lens,
        context_lens=inputs.context_lens,
        kv_lens=inputs.kv_lens,
        page_table=inputs.page_table,
        kv_indices=paging.kv_indices(config, inputs.page_table, row, positions, is_valid),
    )
    model = loading.merge(graphdef, params)
    _, pools = model(
        inputs.tokens,
        positions,
        attend=_attend(config, batch),
        caches=memory["pools"],
        valid=is_valid,
    )
    return {"pools": pools}, inputs.cu_q_lens[R]


def forward_blocks(
    config: config_lib.StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    tokens: Int32[Array, "R L"],
    context_lens: Int32[Array, " R"],
    kv_lens: Int32[Array, " R"],
    page_table: Int32[Array, "R M"],
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns the hidden states of one block of each row, and the pool with their K,V written.

    Rows whose `kv_lens` is 0 are padding and write nothing.
    """
    R, L = tokens.shape
    positions = context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)  # [R, L]
    rows = jnp.repeat(jnp.arange(R, dtype=jnp.int32), L)
    is_valid = jnp.repeat(kv_lens > 0, L)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(R + 1, dtype=jnp.int32) * L,
        context_lens=context_lens,
        kv_lens=kv_lens,
        page_table=page_table,
        kv_indices=paging.kv_indices(config, page_table, rows, positions.reshape(-1), is_valid),
    )
    hidden, written = model(
        tokens.reshape(-1),
        positions.reshape(-1),
        attend=_attend(config, batch, q_len=L),
        caches=pools,
        valid=is_valid,
    )
    # This attention returns the pool of each layer, never None.
    return hidden.reshape(R, L, -1), cast(list[Array], written)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Up to `count` blocks that are committed beside others: those of `rows` where `granted`."""

    rows: state_lib.RowState
    granted: Bool[Array, " R"]
    count: int


def step_forward(
    config: config_lib.StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    page_table: Int32[Array, "R M"],
    state: state_lib.RowState,
    active: Bool[Array, " R"],
    commits: Commits,
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns the hidden states of the blocks of `active` rows, and the pools.

    Of the blocks that are committed, only K,V are kept.
    """
    R, L = state.tokens.shape
    tokens, context_lens = state.tokens, state.context_lens
    kv_lens = jnp.where(active, context_lens + L, 0)
    if commits.count:
        before = commits.rows
        (row,) = jnp.nonzero(commits.granted, size=commits.count, fill_value=R)
        is_used, row = row < R, jnp.minimum(row, R - 1)
        tokens = jnp.concatenate([tokens, before.tokens[row]])
        context_lens = jnp.concatenate([context_lens, before.context_lens[row]])
        committed = jnp.where(is_used, before.context_lens[row] + L, 0)
        kv_lens = jnp.concatenate([kv_lens, committed])
        page_table = jnp.concatenate([page_table, page_table[row]])
    hidden, pools = forward_blocks(config, model, pools, tokens, context_lens, kv_lens, page_table)
    # The barrier turns the slice into a copy. A slice that a kernel reads in place prevents CUDA
    # before 12.9 (XLA says) from capturing the loop.
    return jax.lax.optimization_barrier(hidden[:R]) if commits.count else hidden, pools


def _attend(
    config: config_lib.StepConfig, batch: attention.PagedBatch, q_len: int | None = None
) -> attention.Attend:
    return attention.paged_attend(
        batch,
        q_len=q_len,
        visibility=config.spec.diffusion.attention_pattern,
        block_size=config.spec.diffusion.block_size,
        implementation=config.implementation,
    )
