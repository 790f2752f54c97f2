"""The state of a decoding row on the device: its block in flight, its algorithm's state, counts.

The states of all running requests lie in slots and stay on the device from launch to launch, so
that a launch can begin before the host has read the results of the one before.

Letters: R rows, L tokens of a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jdllm import decoding
from jdllm.decoding.block import interface
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.config import StepConfig
from jdllm.runner.launch.rows import select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What a row carries from step to step and from launch to launch; every leaf leads with R.

    `steps` and `logprobs` describe when a token was last written: at which step of its block,
    counted from 1, and with which log-probability. `extra` has one tree for each compiled
    algorithm. `has_kv`: a forward has computed the whole block. `is_final`: the block's tokens are
    in the outputs, but its K,V is not final yet.
    The last three of the arrays that follow count within one launch: blocks in its outputs, edits,
    and forwards with the row. Only causal families have `length`, the tokens of the block.
    """

    tokens: Int32[Array, "R L"]
    masked: Bool[Array, "R L"]
    editable: Bool[Array, "R L"]
    steps: Int32[Array, "R L"]
    logprobs: Float32[Array, "R L"]
    step: Int32[Array, " R"]
    extra: Any
    context_lens: Int32[Array, " R"]
    tokens_left: Int32[Array, " R"]
    has_kv: Bool[Array, " R"]
    is_final: Bool[Array, " R"]
    is_finished: Bool[Array, " R"]
    is_invalid: Bool[Array, " R"]
    num_blocks: Int32[Array, " R"]
    num_edited: Int32[Array, " R"]
    nfe: Int32[Array, " R"]
    length: Int32[Array, " R"] | None = None


def empty_slots(num_slots: int, config: StepConfig) -> RowState:
    """Returns row states before the first launch; nobody reads their values."""
    L = config.spec.diffusion.block_size

    def zeros() -> jax.Array:  # a new array for each leaf, since each is donated
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
        has_kv=no(),
        is_final=no(),
        is_finished=no(),
        is_invalid=no(),
        num_blocks=zeros(),
        num_edited=zeros(),
        nfe=zeros(),
        length=zeros() if config.is_causal else None,
    )


def enter(
    config: StepConfig,
    inputs: DenoiseInputs,
    slots: RowState,
    is_row: Bool[Array, " R"],
) -> RowState:
    """Returns the rows' states at the start of a launch: those of their slots, or new ones."""
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
        # A block of committed tokens alone: its forward gives the first token of the next.
        is_final=inputs.head_lens >= (1 if config.is_causal else L),
        length=inputs.head_lens if config.is_causal else None,
    )
    zeros = jnp.zeros_like(inputs.slot)
    return dataclasses.replace(
        select(is_row & ~inputs.is_fresh, kept, dataclasses.replace(fresh, is_finished=~is_row)),
        num_blocks=zeros,
        num_edited=zeros,
        nfe=zeros,
    )


def is_active(inputs: DenoiseInputs, state: RowState) -> Bool[Array, " R"]:
    """Returns whether the next step forwards the row's block."""
    L = state.tokens.shape[1]
    return ~state.is_finished & (state.context_lens + L <= inputs.capacity)


def as_block(
    inputs: DenoiseInputs, state: RowState, active: Bool[Array, " R"]
) -> interface.BlockState:
    """Returns the rows' blocks as rules see them, without a rule's own state."""
    return interface.BlockState(
        tokens=state.tokens,
        masked=state.masked,
        editable=state.editable,
        done=~active,
        params=inputs.params,
        extra=(),
    )


def forwarded(
    config: StepConfig,
    inputs: DenoiseInputs,
    state: RowState,
    active: Bool[Array, " R"],
) -> Bool[Array, "R L"]:
    """Returns the positions that the next step computes: whole blocks, unless a rule says less."""
    found = jnp.ones_like(state.masked)
    for i, name in enumerate(config.algorithms):
        algorithm = decoding.BLOCK_ALGORITHMS[name]
        if algorithm.forwards_parts:
            others = (inputs.algorithm != i) | state.is_final | ~state.has_kv
            found &= others[:, None] | algorithm.forwards(as_block(inputs, state, active))
    return found & active[:, None]


def predicted(config: StepConfig, state: RowState) -> Bool[Array, "R L"]:
    """Returns the positions that a forward proposes tokens for.

    Shifted logits come from the block before for its first position, and from the block itself for
    all others, so the first position is written by a step of its own.
    """
    if not config.is_shifted:
        return jnp.ones_like(state.masked)
    is_first = jnp.arange(state.masked.shape[1]) == 0
    return is_first == state.masked[:, :1]


def has_ended(
    inputs: DenoiseInputs,
    state: RowState,
    tokens: Int32[Array, "R L"],
    settled: Bool[Array, "R L"],
) -> Bool[Array, " R"]:
    """Returns whether all positions up to the first end token or the token limit are settled."""
    L = tokens.shape[1]
    place = jnp.arange(L, dtype=jnp.int32)
    head = L - jnp.sum(state.editable, axis=1, dtype=jnp.int32)
    limit = (head + state.tokens_left)[:, None]
    shown = state.editable & (place < limit)
    is_end = shown & settled & jnp.any(tokens[..., None] == inputs.end_ids[:, None], axis=2)
    first_end = jnp.min(jnp.where(is_end, place, L), axis=1, keepdims=True)
    is_open = jnp.any(shown & (place < first_end) & ~settled, axis=1)
    return ~is_open & ((first_end < L) | (limit <= L))[:, 0]


def advance(config: StepConfig, state: RowState, where: Bool[Array, " R"]) -> RowState:
    """Returns the state in which the rows of `where` have moved on to a fresh block."""
    L = state.tokens.shape[1]
    column = where[:, None]
    return dataclasses.replace(
        state,
        tokens=jnp.where(column, config.mask_token_id, state.tokens),
        masked=state.masked | column,
        editable=state.editable | column,
        step=jnp.where(where, 0, state.step),
        extra=select(where, jax.tree.map(jnp.zeros_like, state.extra), state.extra),
        context_lens=state.context_lens + jnp.where(where, L, 0),
        has_kv=state.has_kv & ~where,
        is_final=state.is_final & ~where,
    )
