"""The forwards that launches run, as pure functions of arrays.

`prefill_step` writes K,V of committed blocks and returns the pool; `forward_blocks` is
the forward of a denoising step (`decode_loop.py`), one block a row. The pool is a list
that the caller donates. Attention is one op for both: K,V of the in-flight tokens are
scattered first, then attended.

Cost per token of a row: the weights are read once a forward, K,V of
`context + in-flight` tokens once a row and layer; the vocabulary is streamed once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import spec as spec_lib
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.runner import forward_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What is static in a compiled step; hashable.

    `max_launch_steps`: denoising steps, and blocks a row, of one decode launch.
    `canvas_length`: positions of a canvas row's state, of full-attention families.
    """

    spec: spec_lib.ModelSpec
    page_size: int
    num_pages: int
    algorithms: tuple[str, ...]
    max_launch_steps: int = 1
    fuses_commits: bool = True
    implementation: str = "auto"
    canvas_length: int = 0


def prefill_step(
    graphdef: Any,
    config: StepConfig,
    params: Any,
    pools: list[jax.Array],
    inputs: forward_batch.PrefillInputs,
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the pool with K,V of the packed tokens written, and the number of tokens.

    The number is there to be waited for: the pool goes on to the next launch. No LM head runs.
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
        slots=kv_slots(config, inputs.page_table, row, positions, is_valid),
    )
    model = loading.merge(graphdef, params)
    _, pools = model(
        inputs.tokens, positions, attend=_attend(config, batch), caches=pools, valid=is_valid
    )
    return pools, inputs.cu_q_lens[R]


def forward_blocks(
    config: StepConfig,
    model: Any,
    pools: list[jax.Array],
    tokens: jax.Array,  # [R, L]
    context_lens: jax.Array,  # [R]
    kv_lens: jax.Array,  # [R], 0 for rows that do nothing
    page_table: jax.Array,  # [R, M]
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns hidden states [R, L, D] of one block a row and the pool with its K,V written."""
    R, L = tokens.shape
    positions = context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)  # [R, L]
    rows = jnp.repeat(jnp.arange(R, dtype=jnp.int32), L)
    is_valid = jnp.repeat(kv_lens > 0, L)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(R + 1, dtype=jnp.int32) * L,
        context_lens=context_lens,
        kv_lens=kv_lens,
        page_table=page_table,
        slots=kv_slots(config, page_table, rows, positions.reshape(-1), is_valid),
    )
    hidden, pools = model(
        tokens.reshape(-1),
        positions.reshape(-1),
        attend=_attend(config, batch, q_len=L),
        caches=pools,
        valid=is_valid,
    )
    return hidden.reshape(R, L, -1), pools


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


def kv_slots(
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
