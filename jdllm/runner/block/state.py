"""What a decoding row is on the device: the block in flight, its algorithm's state, its counts.

The states of all running requests lie in slots and stay on the device from launch to launch, so
that a launch can begin before the host has read the one before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import decoding
from jdllm.runner import config as config_lib
from jdllm.runner.block import inputs as inputs_lib
from jdllm.runner.launch.rows import select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a row carries from step to step and from launch to launch; every leaf leads with R.

    `steps` and `logprobs` are those of a token's last writing: the step of its block, from
    1, and its log-probability then. `is_final`: the block was put into a ring, its K,V is
    not final yet. The three counts are those of a launch: blocks in its ring, edits, and
    forwards with the row.
    """

    tokens: jax.Array  # [R, L] int32
    masked: jax.Array  # [R, L] bool
    editable: jax.Array  # [R, L] bool
    steps: jax.Array  # [R, L] int32
    logprobs: jax.Array  # [R, L] float32
    step: jax.Array  # [R] int32
    extra: Any  # one tree per compiled algorithm
    context_lens: jax.Array  # [R] int32
    tokens_left: jax.Array  # [R] int32
    is_final: jax.Array  # [R] bool
    is_finished: jax.Array  # [R] bool
    is_invalid: jax.Array  # [R] bool
    num_blocks: jax.Array  # [R] int32
    num_edited: jax.Array  # [R] int32
    nfe: jax.Array  # [R] int32


def empty_slots(num_slots: int, config: config_lib.StepConfig) -> RowState:
    """Returns the row states of a runner that has served nothing; their values do not matter."""
    L = config.spec.diffusion.block_size

    def zeros() -> jax.Array:  # one of its own for each leaf: they are donated
        return jnp.zeros((num_slots,), jnp.int32)

    def no() -> jax.Array:
        return jnp.zeros((num_slots,), bool)

    return RowState(
        tokens=jnp.zeros((num_slots, L), jnp.int32),
        masked=jnp.zeros((num_slots, L), bool),
        editable=jnp.zeros((num_slots, L), bool),
        steps=jnp.zeros((num_slots, L), jnp.int32),
        logprobs=jnp.zeros((num_slots, L), jnp.float32),
        step=zeros(),
        extra=tuple(
            decoding.BLOCK_ALGORITHMS[name].init_extra(num_slots, L) for name in config.algorithms
        ),
        context_lens=zeros(),
        tokens_left=zeros(),
        is_final=no(),
        is_finished=no(),
        is_invalid=no(),
        num_blocks=zeros(),
        num_edited=zeros(),
        nfe=zeros(),
    )


def enter(
    config: config_lib.StepConfig,
    inputs: inputs_lib.DenoiseInputs,
    slots: RowState,
    is_row: jax.Array,
) -> RowState:
    """Returns the rows' states at the start of a launch: from their slots, or new ones."""
    R, L = inputs.tokens.shape
    last = slots.step.shape[0] - 1
    kept = jax.tree.map(lambda leaf: leaf[jnp.minimum(inputs.slot, last)], slots)
    writes = jnp.arange(L, dtype=jnp.int32) >= inputs.head_lens[:, None]
    fresh = dataclasses.replace(
        empty_slots(R, config),
        tokens=inputs.tokens,
        masked=writes,
        editable=writes,
        context_lens=inputs.context_lens,
        tokens_left=inputs.tokens_left,
    )
    zeros = jnp.zeros_like(inputs.slot)
    return dataclasses.replace(
        select(is_row & ~inputs.is_fresh, kept, dataclasses.replace(fresh, is_finished=~is_row)),
        num_blocks=zeros,
        num_edited=zeros,
        nfe=zeros,
    )


def is_active(inputs: inputs_lib.DenoiseInputs, state: RowState) -> jax.Array:
    """Returns [R]: the row's block is forwarded in the next step."""
    L = state.tokens.shape[1]
    return ~state.is_finished & (state.context_lens + L <= inputs.capacity)


def advance(config: config_lib.StepConfig, state: RowState, where: jax.Array) -> RowState:
    """Returns the state with a fresh block after the present one, for the rows of `where` [R]."""
    L = state.tokens.shape[1]
    column = where[:, None]
    mask_id = config.spec.diffusion.mask_token_id
    return dataclasses.replace(
        state,
        tokens=jnp.where(column, mask_id, state.tokens),
        masked=state.masked | column,
        editable=state.editable | column,
        step=jnp.where(where, 0, state.step),
        extra=select(where, jax.tree.map(jnp.zeros_like, state.extra), state.extra),
        context_lens=state.context_lens + jnp.where(where, L, 0),
        is_final=state.is_final & ~where,
    )
