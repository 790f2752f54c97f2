"""The forwards that block launches run: whole committed blocks, or one block of each row.

`prefill_step` writes K,V of committed blocks and returns the pool; `forward_blocks` and
`forward_parts` are the forwards of a denoising step (`loop.py`). The caller donates the pool.
All use the same attention op: it first writes K,V of the in-flight tokens, then attends.

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
from jdllm.runner import packed, paging
from jdllm.runner.block import sizes
from jdllm.runner.block.state import RowState
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.spec import AttentionPattern


def prefill_step(
    graphdef: nnx.GraphDef,
    config: StepConfig,
    params: program.Params,
    memory: program.Memory,
    inputs: packed.PackedInputs,
) -> tuple[program.Memory, Int32[Array, ""]]:
    """Returns the pool with K,V of the packed tokens written, and the number of tokens.

    The host waits for the number, since the pool is donated to the next launch. No LM head runs.
    """
    batch, positions, is_valid = packed.paged_batch(config, inputs)
    model = loading.merge(graphdef, params)
    _, pools = model(
        inputs.tokens,
        positions,
        attend=attention.paged_attend(
            batch,
            visibility=config.spec.diffusion.attention_pattern,
            block_size=config.spec.diffusion.block_size,
            implementation=config.implementation,
        ),
        caches=memory["pools"],
        valid=is_valid,
    )
    return {"pools": pools}, jnp.sum(is_valid, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Up to `count` blocks that are committed beside others: those of `rows` where `granted`."""

    rows: RowState
    granted: Bool[Array, " R"]
    count: int


def forward_blocks(
    config: StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    page_table: Int32[Array, "R M"],
    state: RowState,
    active: Bool[Array, " R"],
    computed: Bool[Array, "R L"],
    commits: Commits,
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns the hidden states of the blocks of active rows, and the pool with K,V written.

    Only the `computed` positions write K,V, and only their hidden states have a meaning. They see
    whole blocks in the pool. Of the blocks that are committed, only K,V are kept.
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
        computed = jnp.concatenate([computed, jnp.broadcast_to(is_used[:, None], (len(row), L))])
        committed = jnp.where(is_used, before.context_lens[row] + L, 0)
        kv_lens = jnp.concatenate([kv_lens, committed])
        page_table = jnp.concatenate([page_table, page_table[row]])
    hidden, pools = _forward_rows(
        config, model, pools, tokens, context_lens, kv_lens, page_table, computed,
        visibility=config.spec.diffusion.attention_pattern,
    )  # fmt: skip
    # The barrier turns the slice into a copy. A slice that a kernel reads in place prevents CUDA
    # before 12.9 (XLA says) from capturing the loop.
    return jax.lax.optimization_barrier(hidden[:R]) if commits.count else hidden, pools


def forward_parts(
    config: StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    page_table: Int32[Array, "R M"],
    state: RowState,
    computed: Bool[Array, "R L"],
    num_parts: int,
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns what `forward_blocks` returns, from a forward of `num_parts` parts of blocks alone.

    There must be no more parts with `computed` positions than that. To the attention kernel, each
    part is a row that sees its whole block.
    """
    R, L = state.tokens.shape
    size = sizes.part_tokens(L)
    of_a_row = L // size

    def in_parts(array: Array) -> Array:  # [R, L] -> [R * of_a_row, size]
        return array.reshape(R * of_a_row, size)

    is_needed = jnp.any(in_parts(computed), axis=1)
    (part,) = jnp.nonzero(is_needed, size=num_parts, fill_value=R * of_a_row)
    is_used, known = part < R * of_a_row, jnp.minimum(part, R * of_a_row - 1)
    row = known // of_a_row
    hidden, pools = _forward_rows(
        config,
        model,
        pools,
        in_parts(state.tokens)[known],
        state.context_lens[row] + known % of_a_row * size,
        jnp.where(is_used, state.context_lens[row] + L, 0),
        page_table[row],
        in_parts(computed)[known] & is_used[:, None],
        visibility=AttentionPattern.FULL,
    )
    whole = jnp.zeros((R * of_a_row, size, hidden.shape[-1]), hidden.dtype)
    return whole.at[part].set(hidden, mode="drop").reshape(R, L, -1), pools


def forward_causal(
    config: StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    page_table: Int32[Array, "R M"],
    state: RowState,
    active: Bool[Array, " R"],
    num_queries: int,
    drafting: Bool[Array, " R"],
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns the hidden states of the blocks of active rows, and the pool with K,V written.

    Blocks have the lengths that the state says, `num_queries` at most. The positions of a block
    that is final see causally, so that its K,V become final, too; those of other blocks see each
    other, and in the rows that are `drafting` they use the model's adapter, if it has one.
    """
    R, L = state.tokens.shape
    assert state.length is not None, "rows of a causal family have lengths"
    in_block = jnp.arange(num_queries, dtype=jnp.int32) < state.length[:, None]
    hidden, pools = _forward_rows(
        config,
        model,
        pools,
        state.tokens[:, :num_queries],
        state.context_lens,
        jnp.where(active, state.context_lens + state.length, 0),
        page_table,
        in_block & active[:, None],
        visibility=AttentionPattern.FULL,
        causal_rows=state.is_final,
        adapted_rows=drafting & ~state.is_final if model.config.has_draft_adapter else None,
    )
    return jnp.pad(hidden, ((0, 0), (0, L - num_queries), (0, 0))), pools


def _forward_rows(
    config: StepConfig,
    model: decoder.Decoder,
    pools: list[Array],
    tokens: Int32[Array, "Q S"],
    first: Int32[Array, " Q"],
    kv_lens: Int32[Array, " Q"],
    page_table: Int32[Array, "Q M"],
    computed: Bool[Array, "Q S"],
    *,
    visibility: AttentionPattern,
    causal_rows: Bool[Array, " Q"] | None = None,
    adapted_rows: Bool[Array, " Q"] | None = None,
) -> tuple[Float[Array, "Q S D"], list[Array]]:
    """Returns the hidden states of S tokens of each of Q rows from the position `first` on."""
    Q, S = tokens.shape
    positions = (first[:, None] + jnp.arange(S, dtype=jnp.int32)).reshape(-1)
    rows, is_valid = jnp.repeat(jnp.arange(Q, dtype=jnp.int32), S), computed.reshape(-1)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(Q + 1, dtype=jnp.int32) * S,
        context_lens=first,
        kv_lens=kv_lens,
        page_table=page_table,
        kv_indices=paging.kv_indices(config, page_table, rows, positions, is_valid),
    )
    attend = attention.paged_attend(
        batch,
        q_len=S,
        visibility=visibility,
        block_size=S,
        causal_rows=causal_rows,
        implementation=config.implementation,
    )
    hidden, written = model(
        tokens.reshape(-1),
        positions,
        attend=attend,
        caches=pools,
        valid=is_valid,
        drafts=None if adapted_rows is None else jnp.repeat(adapted_rows, S),
    )
    # This attention returns the pool of each layer, never None.
    return hidden.reshape(Q, S, -1), cast(list[Array], written)
