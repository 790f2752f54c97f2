"""The canvas launch: many denoising steps of full-attention rows in one loop on the device.

A step forwards a window of each row (`decoding/canvas/interface.py`), computes the vocabulary
statistics of the positions that the row's algorithm wants, lets the algorithm write tokens, and
plans the next window. Rows are ragged: their windows lie one after the other in a vector of tokens
(`packing.py`), which is padded to one of a few compiled sizes; each step chooses its size. So a row
that needs all of its canvas and a row that needs one block share a forward, and neither pays for
the other's length. A finished row takes no tokens, and no row waits for the slowest. The host can
end the launch between two steps.

K,V of the forwarded positions overwrite those in the row's pages before anything is attended; each
token attends to its whole canvas. A cache mode is no more than this: it forwards less than the
canvas and reuses what the pages hold.

Shifted families predict position p from the hidden state of p - 1 of the same row. Where p is the
first position of its window, the step uses the state kept from the last forward of p - 1.

Guidance (`cfg_scale` w) runs a second forward with the prompt masked, and mixes the two hidden
states: h = u + (w + 1)(c - u). The states are mixed after the last norm. The LM head is linear, so
the logits are those of the published rule z = z_u + (w + 1)(z_c - z_u).

Letters: R rows, S positions of the longest canvas, T packed tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from jdllm.decoding.canvas.interface import CanvasProposal
from jdllm.layers import attention
from jdllm.models import decoder, loading
from jdllm.runner import logit_rows, paging
from jdllm.runner.canvas import asked
from jdllm.runner.canvas.inputs import CanvasInputs
from jdllm.runner.canvas.packing import SEGMENT, Packing, pack, segments
from jdllm.runner.canvas.proposal import positions_of_a_pass, propose
from jdllm.runner.canvas.state import CanvasState, Slots, algorithms, as_canvas, enter, plan
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, program
from jdllm.runner.launch.rows import select
from jdllm.spec import AttentionPattern


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasOutputs:
    """What the host reads after a launch; `scheduler.batch` says what the fields mean.

    Positions [settled_before, num_settled) of a row became final in the launch. `num_forwarded`
    counts the row's tokens; `num_tokens` those of all forwards, padding included. `top` has the
    lists of launches with rows that need their logits. The arrays are traced in the launch and
    numpy's on the host, hence `Any`.
    """

    tokens: Int32[Any, "R S"]
    steps: Int32[Any, "R S"]
    logprobs: Float32[Any, "R S"]
    settled_before: Int32[Any, " R"]
    num_settled: Int32[Any, " R"]
    nfe: Int32[Any, " R"]
    num_full: Int32[Any, " R"]
    num_forwarded: Int32[Any, " R"]
    is_invalid: Bool[Any, " R"]
    num_steps: Int32[Any, ""]
    num_tokens: Int32[Any, ""]
    top: logit_rows.TopTokens | None = None


def canvas_launch(
    graphdef: nnx.GraphDef,
    config: StepConfig,
    sizes: tuple[int, ...],
    params: program.Params,
    memory: program.Memory,
    inputs: CanvasInputs,
) -> tuple[program.Memory, CanvasOutputs]:
    """Returns the memory (pools, states of all slots) and the outputs after the launch.

    The caller donates `memory`, and ensures that the last of `sizes` holds all rows' canvases.
    """
    slots: Slots = memory["slots"]
    is_row = inputs.slot < slots.words.shape[0]
    body = _Body(
        config=config,
        model=loading.merge(graphdef, params),
        inputs=inputs,
        is_row=is_row,
        variants=sizes,
        chunk=positions_of_a_pass(is_row.shape[0], sizes[-1]),
    )
    has_logits = inputs.logits is not None
    begin = driver.Carry.begin(
        inputs.limits,
        memory=memory["pools"],
        rows=enter(config, inputs, slots, is_row),
        gathered=asked.enter(inputs, memory["logit_slots"]) if has_logits else None,
        num_counts=1,
    )
    # Folded: each array that a step changes costs a kernel or a copy of its own, however short.
    carry = driver.run(body, begin, inputs.limits, folds=True, **config.loop_options)
    state: CanvasState = carry.rows
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
        top=carry.gathered,
    )
    after = {"pools": carry.memory, "slots": slots.write(inputs.slot, state)}
    if has_logits:
        after["logit_slots"] = asked.leave(inputs, memory["logit_slots"], carry.gathered)
    return after, outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A denoising step of all rows; its variants are the compiled sizes, in packed tokens.

    The vocabulary is streamed for `chunk` positions at a time.
    """

    config: StepConfig
    model: decoder.Decoder
    inputs: CanvasInputs
    is_row: Bool[Array, " R"]
    variants: tuple[int, ...]
    chunk: int

    def is_finished(self, rows: CanvasState) -> Bool[Array, " R"]:
        return rows.is_finished & self.is_row

    def is_active(self, rows: CanvasState) -> Bool[Array, " R"]:
        return ~rows.is_finished

    def written(self, rows: CanvasState) -> Array:
        return rows.tokens

    def choose(self, rows: CanvasState) -> Int32[Array, ""]:
        wanted = jnp.sum(segments(rows.window))
        smaller = jnp.asarray(self.variants, jnp.int32)[:-1] < wanted
        return jnp.sum(smaller, dtype=jnp.int32)

    def step(self, variant: int, carry: driver.Carry) -> driver.Carry:
        state, pools, forwards, top = _step(
            self.config,
            self.model,
            self.inputs,
            carry.rows,
            carry.memory,
            carry.gathered,
            variant,
            self.chunk,
        )
        (num_tokens,) = carry.counts
        return dataclasses.replace(
            carry,
            memory=pools,
            rows=state,
            gathered=top,
            num_steps=carry.num_steps + forwards,
            counts=(num_tokens + forwards * variant,),
        )


def _step(
    config: StepConfig,
    model: decoder.Decoder,
    inputs: CanvasInputs,
    state: CanvasState,
    pools: list[Array],
    top: logit_rows.TopTokens | None,
    size: int,
    chunk: int,
) -> tuple[CanvasState, list[Array], Int32[Array, ""], logit_rows.TopTokens | None]:
    """Returns the state and the pool after one step, its number of forwards, and the lists.

    Each forward has `size` packed tokens. The vocabulary is streamed for `chunk` positions at a
    time.
    """
    window, active = state.window, ~state.is_finished
    packing = pack(window, size)
    forward = functools.partial(_forward, config, model, inputs, state, packing)
    hidden, pools = forward(active, state.tokens, pools)
    guided = jnp.zeros_like(active)
    if any(algorithm.guides for algorithm in algorithms(config)):
        guided = active & (inputs.params.cfg_scale > 0)
        hidden, pools = _guide(config, inputs, state, packing, forward, guided, hidden, pools)
    proposal, is_nan, listed = propose(
        config, inputs, model.unembedding(), state, packing, hidden, chunk=chunk
    )
    is_nan |= packing.any_of_row(jnp.any(jnp.isnan(hidden), axis=1))
    broken = active & is_nan
    tokens, masked, extras = _update(config, inputs, state, proposal, active & ~broken)
    written = state.masked & ~masked
    if top is not None and listed is not None:
        top = listed.where(written, top)
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
    planned = plan(config, inputs, updated)
    if state.edge.shape[1]:
        before = planned.window.low - 1
        place = packing.cu_q_lens[:-1] + before - window.low
        was_forwarded = (before >= window.low) & (before < window.high)
        new = hidden[jnp.clip(place, 0, size - 1)].astype(state.edge.dtype)
        planned = dataclasses.replace(
            planned, edge=jnp.where(was_forwarded[:, None], new, state.edge)
        )
    return planned, pools, 1 + jnp.any(guided).astype(jnp.int32), top


def _forward(
    config: StepConfig,
    model: decoder.Decoder,
    inputs: CanvasInputs,
    state: CanvasState,
    packing: Packing,
    takes_part: Bool[Array, " R"],
    tokens: Int32[Array, "R S"],
    pools: list[Array],
) -> tuple[Float[Array, "T D"], list[Array]]:
    """Returns the hidden states of the packed windows, and the pool with their K,V written."""
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
        visibility=AttentionPattern.FULL,
        block_size=SEGMENT,
        implementation=config.implementation,
    )
    hidden, written = model(
        tokens[packing.row, packing.positions],
        packing.positions,
        attend=attend,
        caches=pools,
        valid=is_valid,
    )
    return hidden, cast(list[Array], written)  # this attention returns pools, never None


def _guide(
    config: StepConfig,
    inputs: CanvasInputs,
    state: CanvasState,
    packing: Packing,
    forward: Callable[..., tuple[Array, list[Array]]],
    guided: Bool[Array, " R"],
    hidden: Float[Array, "T D"],
    pools: list[Array],
) -> tuple[Float[Array, "T D"], list[Array]]:
    """Returns hidden states moved away from those without a prompt, and the pool.

    The second forward leaves K,V that are wrong for the row, so algorithms with guidance forward
    the whole canvas in every step.
    """
    is_prompt = jnp.arange(state.tokens.shape[1]) < state.start[:, None]
    blind = jnp.where(is_prompt & guided[:, None], config.mask_token_id, state.tokens)

    def again(_, carry):
        conditional, pools = carry
        unconditional, pools = forward(guided, blind, pools)
        c, u = (h.astype(jnp.float32) for h in (conditional, unconditional))
        mixed = u + (inputs.params.cfg_scale[packing.row] + 1)[:, None] * (c - u)
        mixed = jnp.where(guided[packing.row][:, None], mixed, c)
        return mixed.astype(conditional.dtype), pools

    # A loop with one turn or none: it stays on the device, and a conditional would not.
    return jax.lax.fori_loop(0, jnp.any(guided).astype(jnp.int32), again, (hidden, pools))


def _update(
    config: StepConfig,
    inputs: CanvasInputs,
    state: CanvasState,
    proposal: CanvasProposal,
    works: Bool[Array, " R"],
) -> tuple[Int32[Array, "R S"], Bool[Array, "R S"], tuple[Any, ...]]:
    """Returns (tokens, masked, extras) after the rows of `works` have seen their proposals."""
    tokens, masked, extras = state.tokens, state.masked, []
    for i, algorithm in enumerate(algorithms(config)):
        is_mine = works & (inputs.algorithm == i)

        def update(_, carry, algorithm=algorithm, is_mine=is_mine):
            tokens, masked, extra = carry
            after = algorithm.update(as_canvas(config, inputs, state, extra), proposal)
            return (
                jnp.where(is_mine[:, None], after.tokens, tokens),
                jnp.where(is_mine[:, None], after.masked, masked),
                select(is_mine, after.extra, extra),
            )

        carry = (tokens, masked, state.extra[i])
        if len(state.extra) > 1:
            # A rule that compares all positions costs nothing where no row uses it.
            carry = jax.lax.fori_loop(0, jnp.any(is_mine).astype(jnp.int32), update, carry)
        else:
            carry = update(0, carry)
        tokens, masked, extra = carry
        extras.append(extra)
    return tokens, masked, tuple(extras)
