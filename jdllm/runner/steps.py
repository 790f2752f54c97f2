"""The two step functions that a launch runs, as pure functions of arrays.

`prefill_step` writes K,V of committed blocks and returns the pool; `decode_step` runs
one denoising step of one block per row. Both take the weights as a plain dict of
arrays and the pool as a list that the caller donates. Attention is one op for both:
K,V of the in-flight tokens are scattered first, then attended.

Cost per token of a row: the forward's weights are read once a launch, K,V of
`context + in-flight` tokens once a row and layer; the vocabulary is streamed once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import decoding
from jdllm.decoding import interface, proposal
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.models import spec as spec_lib
from jdllm.runner import forward_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What is static in a compiled step; hashable."""

    spec: spec_lib.ModelSpec
    page_size: int
    num_pages: int
    algorithms: tuple[str, ...]
    implementation: str = "auto"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutputs:
    """Row results of a decode step; see `scheduler.batch.RowResult`."""

    tokens: jax.Array  # [R, L]
    masked: jax.Array  # [R, L]
    is_final: jax.Array  # [R]
    is_done: jax.Array  # [R]
    num_edited: jax.Array  # [R]
    is_invalid: jax.Array  # [R]
    extra: Any


def prefill_step(
    graphdef: Any,
    config: StepConfig,
    params: Any,
    pools: list[jax.Array],
    inputs: forward_batch.PrefillInputs,
) -> list[jax.Array]:
    """Returns the pool with K,V of the packed tokens written; no LM head runs."""
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
        slots=_slots(config, inputs.page_table, row, positions, is_valid),
    )
    model = loading.merge(graphdef, params)
    _, pools = model(
        inputs.tokens, positions, attend=_attend(config, batch), caches=pools, valid=is_valid
    )
    return pools


def decode_step(
    graphdef: Any,
    config: StepConfig,
    params: Any,
    pools: list[jax.Array],
    inputs: forward_batch.DecodeInputs,
) -> tuple[list[jax.Array], DecodeOutputs]:
    """Returns the pool and each row's block after one denoising step."""
    R, L = inputs.tokens.shape
    positions = inputs.context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)  # [R, L]
    rows = jnp.repeat(jnp.arange(R, dtype=jnp.int32), L)
    is_valid = jnp.repeat(inputs.kv_lens > 0, L)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(R + 1, dtype=jnp.int32) * L,
        context_lens=inputs.context_lens,
        kv_lens=inputs.kv_lens,
        page_table=inputs.page_table,
        slots=_slots(config, inputs.page_table, rows, positions.reshape(-1), is_valid),
    )
    model = loading.merge(graphdef, params)
    hidden, pools = model(
        inputs.tokens.reshape(-1),
        positions.reshape(-1),
        attend=_attend(config, batch, q_len=L),
        caches=pools,
        valid=is_valid,
    )
    hidden = hidden.reshape(R, L, -1)
    return pools, _denoise(config, model.unembedding(), hidden, positions, inputs)


def _denoise(
    config: StepConfig,
    lm_head: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    inputs: forward_batch.DecodeInputs,
) -> DecodeOutputs:
    """Proposes once, lets every compiled algorithm update, and keeps each row's own result."""
    mask_id = config.spec.diffusion.mask_token_id
    before = interface.BlockState(
        tokens=inputs.tokens,
        masked=inputs.masked,
        editable=inputs.editable,
        done=inputs.kv_lens == 0,
        params=inputs.params,
        extra=(),
    )
    proposed = proposal.propose(
        hidden,
        lm_head,
        before,
        positions,
        inputs.step,
        inputs.sampling,
        forbidden_ids=() if mask_id is None else (mask_id,),
        implementation=config.implementation,
    )
    after, is_final, extras = before, jnp.zeros_like(before.done), []
    for i, name in enumerate(config.algorithms):
        algorithm = decoding.ALGORITHMS[name]
        updated = algorithm.update(dataclasses.replace(before, extra=inputs.extra[i]), proposed)
        extras.append(updated.extra)
        is_mine = inputs.algorithm == i
        is_final = jnp.where(is_mine, algorithm.is_final(updated), is_final)
        after = jax.tree.map(
            lambda new, old, mine=is_mine: jnp.where(
                mine.reshape((-1,) + (1,) * (new.ndim - 1)), new, old
            ),
            dataclasses.replace(updated, extra=()),
            after,
        )
    edited = ~before.masked & (after.tokens != before.tokens)
    return DecodeOutputs(
        tokens=after.tokens,
        masked=after.masked,
        is_final=is_final,
        is_done=after.done,
        num_edited=jnp.sum(edited, axis=-1, dtype=jnp.int32),
        is_invalid=jnp.any(jnp.isnan(proposed.best_prob), axis=-1) & (inputs.kv_lens > 0),
        extra=tuple(extras),
    )


def _attend(
    config: StepConfig, batch: attention.PagedBatch, q_len: int | None = None
) -> attention.Attend:
    return attention.paged_attend(
        batch,
        q_len=q_len,
        visibility=config.spec.diffusion.attention_pattern,
        block_size=config.spec.diffusion.block_size,
        implementation=config.implementation,
    )


def _slots(
    config: StepConfig,
    page_table: jax.Array,
    row: jax.Array,
    positions: jax.Array,
    is_valid: jax.Array,
) -> jax.Array:
    """Returns [T] pool slots, distinct and out of range for padding, so that it is dropped."""
    page = page_table[row, positions // config.page_size]
    slot = page * config.page_size + positions % config.page_size
    beyond = config.num_pages * config.page_size + jnp.arange(positions.shape[0], dtype=jnp.int32)
    return jnp.where(is_valid, slot, beyond)
