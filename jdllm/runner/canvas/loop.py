"""The canvas launch: many denoising steps of full-attention rows in one loop on the device.

A step forwards a window of each row (`decoding/canvas.py`), takes the vocabulary statistics of
the positions that its algorithm wants, lets the algorithm write, and plans the next window. Rows
are ragged: their windows lie one after the other in a vector of tokens (`canvas_packing.py`)
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
from jdllm.runner import forward_batch, steps
from jdllm.runner.block import state as row_state
from jdllm.runner.canvas import packing as canvas_packing
from jdllm.runner.canvas import proposal as canvas_proposal
from jdllm.runner.canvas import state as canvas_state


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
    config: steps.StepConfig,
    sizes: tuple[int, ...],
    params: Any,
    memory: tuple[list[jax.Array], canvas_state.Slots],
    inputs: forward_batch.CanvasInputs,
) -> tuple[tuple[list[jax.Array], canvas_state.Slots], CanvasOutputs]:
    """Returns (pools, states of all slots) and outputs after up to `inputs.max_steps` steps.

    The caller donates `memory`, and sees to it that the last of `sizes` holds all rows' canvases.
    """
    pools, slots = memory
    is_row = inputs.slot < slots.words.shape[0]
    model = loading.merge(graphdef, params)
    chunk = canvas_proposal.positions_of_a_pass(is_row.shape[0], sizes[-1])

    entered = canvas_state.enter(config, inputs, slots, is_row)
    begun = (entered, inputs.interrupt.count, (jnp.int32(0),) * 2)
    folding = canvas_state.Folding.of(begun)

    def unfolded(carry):
        pools, folded = carry
        return pools, *folding.unfold(folded)

    def goes_on(carry):
        _, state, word, (num_steps, _) = unfolded(carry)
        waited_for = jnp.sum(state.is_finished & is_row) > inputs.max_finished
        is_over = waited_for | inputs.interrupt.is_asked(word)
        return (num_steps < inputs.max_steps) & jnp.any(~state.is_finished) & ~is_over

    def chosen(carry):
        _, state, *_ = unfolded(carry)
        wanted = jnp.sum(canvas_packing.segments(state.window))
        return jnp.sum(jnp.asarray(sizes, jnp.int32)[:-1] < wanted, dtype=jnp.int32)

    def one_step(size, carry):
        pools, state, _, (num_steps, num_tokens) = unfolded(carry)
        state, pools, forwards = _step(config, model, inputs, state, pools, size, chunk)
        counts = (num_steps + forwards, num_tokens + forwards * size)
        word = inputs.interrupt.look(state.tokens, implementation=config.implementation)
        return pools, folding.fold((state, word, counts))

    def phases(carry):
        # One loop per size, as in `decode_loop`: a conditional would make XLA copy the pool.
        for place, size in enumerate(sizes):
            carry = jax.lax.while_loop(
                lambda carry, place=place: goes_on(carry) & (chosen(carry) == place),
                functools.partial(one_step, size),
                carry,
            )
        return carry

    carry = jax.lax.while_loop(goes_on, phases, (pools, folding.fold(begun)))
    pools, state, _, (num_steps, num_tokens) = unfolded(carry)
    slots = slots.write(inputs.slot, state)
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
        num_steps=num_steps,
        num_tokens=num_tokens,
    )
    return (pools, slots), outputs


def _step(
    config: steps.StepConfig,
    model: Any,
    inputs: forward_batch.CanvasInputs,
    state: canvas_state.CanvasState,
    pools: list[jax.Array],
    size: int,
    chunk: int,
) -> tuple[canvas_state.CanvasState, list[jax.Array], jax.Array]:
    """Returns the state and the pool after one step of `size` packed tokens, and its forwards.

    The vocabulary is streamed for `chunk` positions at a time.
    """
    window, active = state.window, ~state.is_finished
    packing = canvas_packing.pack(window, size)
    forward = functools.partial(_forward, config, model, inputs, state, packing)
    hidden, pools = forward(active, state.tokens, pools)
    guided = jnp.zeros_like(active)
    if any(algorithm.guides for algorithm in canvas_state.algorithms(config)):
        guided = active & (inputs.params.cfg_scale > 0)
        hidden, pools = _guide(config, inputs, state, packing, forward, guided, hidden, pools)
    proposal, is_nan = canvas_proposal.propose(
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
    planned = canvas_state.plan(config, inputs, updated)
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
    config: steps.StepConfig,
    model: Any,
    inputs: forward_batch.CanvasInputs,
    state: canvas_state.CanvasState,
    packing: canvas_packing.Packing,
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
        slots=steps.kv_slots(config, inputs.page_table, packing.row, packing.positions, is_valid),
    )
    attend = attention.paged_attend(
        batch,
        visibility=spec_lib.AttentionPattern.FULL,
        block_size=canvas_packing.SEGMENT,
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
    for i, algorithm in enumerate(canvas_state.algorithms(config)):
        is_mine = works & (inputs.algorithm == i)

        def update(_, carry, algorithm=algorithm, is_mine=is_mine):
            tokens, masked, extra = carry
            after = algorithm.update(canvas_state.as_canvas(config, inputs, state, extra), proposal)
            return (
                jnp.where(is_mine[:, None], after.tokens, tokens),
                jnp.where(is_mine[:, None], after.masked, masked),
                row_state.select(is_mine, after.extra, extra),
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
