"""Canvas rows that need their logits: their proposals from edited logits, and the best tokens.

The wanted positions of one row after the other, `POSITIONS` at a time, get their logits. A row that
only wants lists keeps the proposal of the streamed vocabulary, so asking for lists never changes a
token. The lists of rows in flight lie in slots of their own, which only launches with such rows
read.

Letters: R rows, S positions of the longest canvas, C positions of a pass.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

import pallas_kernels
from jdllm.layers import unembedding
from jdllm.runner import logit_rows
from jdllm.runner.canvas.inputs import CanvasInputs
from jdllm.runner.canvas.sources import Draws, Sources
from jdllm.runner.canvas.state import CanvasState
from jdllm.runner.config import StepConfig

POSITIONS = 64  # of a pass: float32 logits of 157k tokens take 40 MB


def empty_slots(num_slots: int, config: StepConfig) -> logit_rows.TopTokens:
    """Returns lists before the first launch; nobody reads their values."""
    return logit_rows.no_tokens(num_slots, config.context_length)


def enter(inputs: CanvasInputs, slots: logit_rows.TopTokens) -> logit_rows.TopTokens:
    """Returns the rows' lists at the start of a launch: those of their slots, or empty ones."""
    last = slots.ids.shape[0] - 1
    kept = jax.tree.map(lambda leaf: leaf[jnp.minimum(inputs.slot, last)], slots)
    empty = logit_rows.no_tokens(*kept.ids.shape[:2])
    return empty.where(jnp.broadcast_to(inputs.is_fresh[:, None], kept.ids.shape[:2]), kept)


def leave(
    inputs: CanvasInputs, slots: logit_rows.TopTokens, rows: logit_rows.TopTokens
) -> logit_rows.TopTokens:
    """Returns the slots with the rows' lists written; padding rows are dropped."""
    return jax.tree.map(lambda old, new: old.at[inputs.slot].set(new, mode="drop"), slots, rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the passes have found: statistics of `CanvasProposal`, and lists."""

    tokens: Int32[Array, "R S"]
    logprob: Float32[Array, "R S"]
    entropy: Float32[Array, "R S"]
    margin: Float32[Array, "R S"]
    top: logit_rows.TopTokens


def find(
    config: StepConfig,
    inputs: CanvasInputs,
    lm_head: unembedding.LMHead,
    state: CanvasState,
    sources: Sources,
    draws: Draws,
    found: Found,
) -> Found:
    """Returns `found` with what the wanted positions of rows that need their logits get.

    Of rows that only want lists, everything else stays as it is. `sources` scales
    nothing here: edits come before the temperature, and `sources.scale` after them.
    """
    assert inputs.logits is not None, "only launches with logits come here"
    options, wanted = inputs.logits, state.window.wanted
    R, S = wanted.shape
    V = lm_head.vocab_size
    C = min(POSITIONS, S)
    asks = options.is_wanted & jnp.any(wanted, axis=1)
    (rows,) = jnp.nonzero(asks, size=R, fill_value=0)
    unscaled = dataclasses.replace(sources, scale=None)

    def one_row(i: Int32[Array, ""], found: Found) -> Found:
        r = rows[i]
        row = jax.tree.map(lambda leaf: leaf[r], options)
        place = jnp.arange(S, dtype=jnp.int32)
        start, end = state.start[r], state.end[r]
        is_output = (place >= start) & (place < end)
        is_prompt = ~is_output & (place < state.length[r])
        context = logit_rows.context(
            row, state.tokens[r], is_prompt, is_output & ~state.masked[r], V
        )
        (chosen,) = jnp.nonzero(wanted[r], size=S + C, fill_value=S)
        count = jnp.sum(wanted[r], dtype=jnp.int32)

        def one_pass(k: Int32[Array, ""], found: Found) -> Found:
            position = jax.lax.dynamic_slice_in_dim(chosen, k * C, C).astype(jnp.int32)
            inside = jnp.minimum(position, S - 1)
            here = jnp.full((C,), r)
            hidden = unscaled.of(here, inside)
            logits = lm_head.logits(hidden)
            edited = logit_rows.edit(row, logits, context, inside, state.tokens[r, inside])
            logits = jnp.where(row.edits, edited, logits)
            if sources.scale is not None:
                logits = jnp.where(logits > logit_rows.NEVER / 2, logits * sources.scale[r], logits)
            drawing = draws.options(here, inside)
            stats = pallas_kernels.logits_stats(
                logits,
                forbidden_ids=config.forbidden_ids,
                min_p=jnp.broadcast_to(row.min_p, (C,)),
                **drawing,
            )
            listed = logit_rows.top_tokens(
                logits, stats.logsumexp, row.num_top, config.forbidden_ids
            )
            best, second = (
                pallas_kernels.probability(logit, stats.logsumexp)
                for logit in (stats.best_logit, stats.second_logit)
            )
            new = Found(
                tokens=stats.drawn_id,
                logprob=stats.drawn_logit - stats.logsumexp,
                entropy=jnp.maximum(stats.entropy, 0.0),
                margin=best - second,
                top=listed,
            )
            before = jax.tree.map(lambda field: field[r, inside], found)
            decided = jax.tree.map(functools.partial(jnp.where, row.edits), new, before)
            return jax.tree.map(
                lambda old, value: old.at[r, position].set(value, mode="drop"),
                found,
                dataclasses.replace(decided, top=listed),
            )

        return jax.lax.fori_loop(0, (count + C - 1) // C, one_pass, found)

    # One turn for each row that asks; the loop stays on the device.
    return jax.lax.fori_loop(0, jnp.sum(asks), one_row, found)
