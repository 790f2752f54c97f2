"""The canvas launch: many denoising steps of full-attention rows in one loop on the device.

A step forwards a window of each row (`decoding/canvas/interface.py`), takes the vocabulary
statistics of the positions that its algorithm wants, lets the algorithm write, and plans the next
window. Rows are ragged: their windows lie one after the other in a vector of tokens (`packing.py`)
that is padded to one of a few compiled sizes, chosen step by step. So a row that needs all of
its canvas and one that needs a block share a forward, and neither pays for the other's length.
A row that is finished takes no tokens; nothing waits for the slowest. Between two steps the
host can end the launch.

K,V of the forwarded positions overwrite those in the row's pages before anything is attended;
each token attends to its whole canvas. A mode that forwards less than the canvas reuses what the
pages hold, and that is all there is to caching.

Shifted families: the prediction of position p comes from the hidden state of p - 1, row by row.
Where p is the first of its window, that is the state kept from the forward that last had p - 1.

Guidance (`cfg_scale` w): a second forward with the prompt masked, and h = u + (w + 1)(c - u) of
the two hidden states. The LM head is linear, so the logits are those of the published rule
z = z_u + (w + 1)(z_c - z_u); the state that is mixed comes after the last norm.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jdllm import spec as spec_lib
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.runner import config as config_lib
from jdllm.runner import paging
from jdllm.runner.canvas import inputs as inputs_lib
from jdllm.runner.canvas import packing as packing_lib
from jdllm.runner.canvas import proposal as proposal_lib
from jdllm.runner.canvas import state as state_lib
from jdllm.runner.launch import driver, program
from jdllm.runner.launch.rows import select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasOutputs:
    """What the host reads after a launch; see `scheduler.batch` for what the fields mean.

    [settled_before, num_settled) of a row became final in the launch.
    """

    tokens: jax.Array  # [R, S]
    steps: jax.Array  # [R, S]
    logprobs: jax.Array  # [R, S]
    settled_before: jax.Array  # [R]
    num_settled: jax.Array  # [R]
    nfe: jax.Array  # [R]
    num_full: jax.Array  # [R]
    num_forwarded: jax.Array  # [R] tokens
    is_invalid: jax.Array  # [R]
    num_steps: jax.Array
    num_tokens: jax.Array  # padding included


def canvas_launch(
    graphdef: Any,
    config: config_lib.StepConfig,
    sizes: tuple[int, ...],
    params: program.Params,
    memory: program.Memory,
    inputs: inputs_lib.CanvasInputs,
) -> tuple[program.Memory, CanvasOutputs]:
    """Returns (pools, states of all slots) and outputs after the launch's steps.

    The caller donates `memory`, and sees to it that the last of `sizes` holds all rows' canvases.
    """
    slots: state_lib.Slots = memory["slots"]
    is_row = inputs.slot < slots.words.shape[0]
    body = _Body(
        config=config,
        model=loading.merge(graphdef, params),
        inputs=inputs,
        is_row=is_row,
        variants=sizes,
        chunk=proposal_lib.positions_of_a_pass(is_row.shape[0], sizes[-1]),
    )
    begin = driver.Carry.begin(
        inputs.limits,
        memory=memory["pools"],
        rows=state_lib.enter(config, inputs, slots, is_row),
        num_counts=1,
    )
    carry = driver.run(body, begin, inputs.limits, folds=True, implementation=config.implementation)
    state: state_lib.CanvasState = carry.rows
    (num_tokens,) = carry.counts
    outputs = CanvasOutputs(
        tokens=state.tokens,
        steps=state.steps,
        logprobs=state.logprobs,
        settled_before=state.settled_before,
        num_settled=state.num_settled,
        nfe=state.nfe,
        num_full=state.num_full,
        num_forwarded=state.num_forwarded,
        is_invalid=state.is_invalid,
        num_steps=carry.num_steps,
        num_tokens=num_tokens,
    )
    return {"pools": carry.memory, "slots": slots.write(inputs.slot, state)}, outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A denoising step of all rows; its variants are the packed tokens of a forward.

    The vocabulary is streamed for `chunk` positions at a time.
    """

    config: config_lib.StepConfig
    model: Any
    inputs: inputs_lib.CanvasInputs
    is_row: jax.Array  # [R]
    variants: tuple[int, ...]
    chunk: int

    def is_finished(self, rows: state_lib.CanvasState) -> jax.Array:
        return rows.is_finished & self.is_row

    def is_active(self, rows: state_lib.CanvasState) -> jax.Array:
        return ~rows.is_finished

    def choose(self, rows: state_lib.CanvasState) -> jax.Array:
        wanted = jnp.sum(packing_lib.segments(rows.window))
        smaller = jnp.asarray(self.variants, jnp.int32)[:-1] < wanted
        return jnp.sum(smaller, dtype=jnp.int32)

    def step(self, variant: int, carry: driver.Carry) -> driver.Carry:
        state, pools, forwards = _step(
            self.config, self.model, self.inputs, carry.rows, carry.memory, variant, self.chunk
        )
        (num_tokens,) = carry.counts
        return dataclasses.replace(
            carry,
            memory=pools,
            rows=state,
            num_steps=carry.num_steps + forwards,
            counts=(num_tokens + forwards * variant,),
        )


def _step(
    config: config_lib.StepConfig,
    model: Any,
    inputs: inputs_lib.CanvasInputs,
    state: state_lib.CanvasState,
    pools: list[jax.Array],
    size: int,
    chunk: int,
) -> tuple[state_lib.CanvasState, list[jax.Array], jax.Array]:
    """Returns the state and the pool after one step of `size` packed tokens, and its forwards.

    The vocabulary is streamed for `chunk` positions at a time.
    """
    window, active = state.window, ~state.is_finished
    packing = packing_lib.pack(window, size)
    forward = functools.partial(_forward, config, model, inputs, state, packing)
    hidden, pools = forward(active, state.tokens, pools)
    guided = jnp.zeros_like(active)
    if any(algorithm.guides for algorithm in state_lib.algorithms(config)):
        guided = active & (inputs.params.cfg_scale > 0)
        hidden, pools = _guide(config, inputs, state, packing, forward, guided, hidden, pools)
    proposal, is_nan = proposal_lib.propose(
        config, inputs, model.unembedding(), state, packing, hidden, chunk=chunk
    )
    is_nan |= packing.any_of_row(jnp.any(jnp.isnan(hidden), axis=1))
    broken = active & is_nan
    tokens, masked, extras = _update(config, inputs, state, proposal, active & ~broken)
    written = state.masked & ~masked
    updated = dataclasses.replace(
        state,
        tokens=tokens,
        masked=masked,
        extra=extras,
        step=state.step + active,
        steps=jnp.where(written, state.step[:, None] + 1, state.steps),
        logprobs=jnp.where(written, proposal.logprob, state.logprobs),
        is_finished=state.is_finished | broken,
        is_invalid=state.is_invalid | broken,
        nfe=state.nfe + active + guided,
        num_full=state.num_full + (active & window.is_full),
        num_forwarded=state.num_forwarded + (1 + guided) * (window.high - window.low),
    )
    planned = state_lib.plan(config, inputs, updated)
    if state.edge.shape[1]:
        before = planned.window.low - 1
        place = packing.cu_q_lens[:-1] + before - window.low
        was_forwarded = (before >= window.low) & (before < window.high)
        new = hidden[jnp.clip(place, 0, size - 1)].astype(state.edge.dtype)
        planned = dataclasses.replace(
            planned, edge=jnp.where(was_forwarded[:, None], new, state.edge)
        )
    return planned, pools, 1 + jnp.any(guided).astype(jnp.int32)


def _forward(
    config: config_lib.StepConfig,
    model: Any,
    inputs: inputs_lib.CanvasInputs,
    state: state_lib.CanvasState,
    packing: packing_lib.Packing,
    takes_part: jax.Array,  # [R]
    tokens: jax.Array,  # [R, S]
    pools: list[jax.Array],
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns hidden states [T, D] of the packed windows and the pool with their K,V written."""
    is_valid = packing.is_valid & takes_part[packing.row]
    batch = attention.PagedBatch(
        cu_q_lens=packing.cu_q_lens,
        context_lens=state.window.low,
        kv_lens=jnp.where(takes_part, state.length, 0),
        page_table=inputs.page_table,
        kv_indices=paging.kv_indices(
            config, inputs.page_table, packing.row, packing.positions, is_valid
        ),
    )
    attend = attention.paged_attend(
        batch,
        visibility=spec_lib.AttentionPattern.FULL,
        block_size=packing_lib.SEGMENT,
        implementation=config.implementation,
    )
    return model(
        tokens[packing.row, packing.positions],
        packing.positions,
        attend=attend,
        caches=pools,
        valid=is_valid,
    )


def _guide(config, inputs, state, packing, forward, guided, hidden, pools):
    """Returns hidden states moved away from those without a prompt, and the pool.

    K,V that the second forward leaves are wrong for the row: algorithms with guidance forward
    the whole canvas every time.
    """
    is_prompt = jnp.arange(state.tokens.shape[1]) < state.start[:, None]
    blind = jnp.where(
        is_prompt & guided[:, None], config.spec.diffusion.mask_token_id, state.tokens
    )

    def again(_, carry):
        conditional, pools = carry
        unconditional, pools = forward(guided, blind, pools)
        c, u = (h.astype(jnp.float32) for h in (conditional, unconditional))
        mixed = u + (inputs.params.cfg_scale[packing.row] + 1)[:, None] * (c - u)
        mixed = jnp.where(guided[packing.row][:, None], mixed, c)
        return mixed.astype(conditional.dtype), pools

    # A loop of one turn or none: it stays on the device where a conditional would not.
    return jax.lax.fori_loop(0, jnp.any(guided).astype(jnp.int32), again, (hidden, pools))


def _update(config, inputs, state, proposal, works):
    """Returns (tokens, masked, extras) after the rows of `works` have seen their proposals."""
    tokens, masked, extras = state.tokens, state.masked, []
    for i, algorithm in enumerate(state_lib.algorithms(config)):
        is_mine = works & (inputs.algorithm == i)

        def update(_, carry, algorithm=algorithm, is_mine=is_mine):
            tokens, masked, extra = carry
            after = algorithm.update(state_lib.as_canvas(config, inputs, state, extra), proposal)
            return (
                jnp.where(is_mine[:, None], after.tokens, tokens),
                jnp.where(is_mine[:, None], after.masked, masked),
                select(is_mine, after.extra, extra),
            )

        carry = (tokens, masked, state.extra[i])
        if len(state.extra) > 1:
            # Rules that compare all positions cost nothing where no row has them.
            carry = jax.lax.fori_loop(0, jnp.any(is_mine).astype(jnp.int32), update, carry)
        else:
            carry = update(0, carry)
        tokens, masked, extra = carry
        extras.append(extra)
    return tokens, masked, tuple(extras)
