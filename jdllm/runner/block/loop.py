"""The denoise launch: many denoising steps of R rows in one loop on the device.

A step forwards one block of every active row, computes the vocabulary statistics, and lets the
row's algorithm update the block. Then the row moves on by itself: a final block goes to the row's
outputs, a block whose K,V is final too advances the context, and the next block begins in the
pages that the scheduler allocated ahead. A row stops at an end token, at its token limit or when
its pages are full; it never waits for another row. The host reads nothing before the launch ends,
but it can ask for the end between two steps.

Fused commit. Some algorithms need one more forward after a block is final, to persist its K,V.
That forward also runs the first step of the next block: the step forwards R blocks that are
denoised and C blocks that are committed, and each is a row of one block for the attention kernel.
The two blocks of a row share its pages. K,V of both are written before either is attended, and
K,V of the committed block never depends on the later block, so the result is that of two forwards.
Each step chooses C from a few compiled sizes; a row that is not among the C persists its block in
a forward of its own.

Shifted logits. Where logit row i predicts position i + 1, the last row of a block predicts the
first position of the next block. The forward that persists a block then is the first step of the
next one, too, which writes that position alone. No other forward can take part in it, so there is
no fused commit, and every algorithm has the forward that persists.

Early exit. A request ends as soon as every position up to its first end token, or up to the token
limit, is settled; later positions are never shown.

Letters: R rows, L tokens of a block, K blocks that a row can finish in the launch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.models import loading
from jdllm.runner.block import asked as asked_lib
from jdllm.runner.block import causal, denoise, forward, sizes
from jdllm.runner.block.asked import leave, remember
from jdllm.runner.block.body import BlockBody
from jdllm.runner.block.frames import add, none_yet
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.block.outputs import DenoiseOutputs, FinishedBlocks, Gathered
from jdllm.runner.block.state import (
    RowState,
    advance,
    enter,
    forwarded,
    has_ended,
    is_active,
)
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver, program


def denoise_launch(
    graphdef: nnx.GraphDef,
    config: StepConfig,
    params: program.Params,
    memory: program.Memory,
    inputs: DenoiseInputs,
) -> tuple[program.Memory, DenoiseOutputs]:
    """Returns the memory (pools, row states of all slots) and the outputs after the launch.

    The caller donates `memory`.
    """
    slots: RowState = memory["slots"]
    R, L = inputs.tokens.shape
    K = config.max_launch_steps
    is_row = inputs.slot < slots.step.shape[0]
    asked = None if inputs.logits is None else asked_lib.enter(inputs, memory["logit_slots"])
    frames = none_yet(R, K, L)
    blocks = FinishedBlocks.none_yet(config, R, with_logits=asked is not None)
    parts = {"config": config, "model": loading.merge(graphdef, params), "inputs": inputs}
    if config.is_causal:
        body = causal.Body(**parts, is_row=is_row, variants=sizes.query_lengths(config))
    else:
        variants = sizes.step_sizes(R, config, is_coarse=asked is not None)
        body = _Body(**parts, is_row=is_row, variants=variants)
    begin = driver.Carry.begin(
        inputs.limits,
        memory=memory["pools"],
        rows=enter(config, inputs, slots, is_row),
        gathered=(blocks, asked, frames),
        num_counts=2,
    )
    carry = driver.run(body, begin, inputs.limits, **config.loop_options)
    state: RowState = carry.rows
    slots = jax.tree.map(lambda old, new: old.at[inputs.slot].set(new, mode="drop"), slots, state)
    computed_tokens, real_tokens = carry.counts
    blocks, asked, frames = carry.gathered
    outputs = DenoiseOutputs(
        blocks=blocks,
        num_blocks=state.num_blocks,
        context_lens=state.context_lens,
        nfe=state.nfe,
        num_edited=state.num_edited,
        is_invalid=state.is_invalid,
        num_steps=carry.num_steps,
        computed_tokens=computed_tokens,
        real_tokens=real_tokens,
        frames=frames,
    )
    memory = {"pools": carry.memory, "slots": slots} | (
        {} if asked is None else {"logit_slots": leave(inputs, memory["logit_slots"], asked)}
    )
    return memory, outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body(BlockBody):
    """A denoising step of all rows; its variants are the compiled sizes."""

    variants: tuple[sizes.StepSize, ...]

    def choose(self, rows: RowState) -> Int32[Array, ""]:
        wanted = jnp.sum(_wants_commit(self.inputs, rows), dtype=jnp.int32)
        computed = forwarded(self.config, self.inputs, rows, self.is_active(rows))
        return sizes.choose(self.variants, wanted, computed)

    def step(self, variant: sizes.StepSize, carry: driver.Carry) -> driver.Carry:
        config, inputs, state = self.config, self.inputs, carry.rows
        computed_tokens, real_tokens = carry.counts
        blocks, asked, frames = carry.gathered
        if asked is not None:
            asked = remember(asked, state)
        active = is_active(inputs, state)
        wants = _wants_commit(inputs, state)
        granted = wants & (jnp.cumsum(wants) <= variant.commits)
        advanced = advance(config, state, granted)
        computed = forwarded(config, inputs, advanced, active)
        about = (config, self.model, carry.memory, inputs.page_table, advanced)
        if variant.parts is None:
            commits = forward.Commits(rows=state, granted=granted, count=variant.commits)
            hidden, pools = forward.forward_blocks(*about, active, computed, commits)
        else:
            hidden, pools = forward.forward_parts(*about, computed, variant.parts)
        advanced = dataclasses.replace(advanced, has_kv=advanced.has_kv | active)
        if config.is_shifted:
            hidden = jnp.roll(hidden, 1, axis=1)
            advanced = advance(config, advanced, active & state.is_final)
        rows, block_size = state.tokens.shape
        real_tokens += jnp.sum(computed, dtype=jnp.int32)
        real_tokens += jnp.sum(granted, dtype=jnp.int32) * block_size
        lm_head = self.model.unembedding()
        gathered = (blocks, asked, frames)
        state, gathered = _update(config, inputs, lm_head, hidden, advanced, active, gathered)
        return dataclasses.replace(
            carry,
            memory=pools,
            rows=state,
            gathered=gathered,
            num_steps=carry.num_steps + 1,
            counts=(computed_tokens + variant.num_tokens(rows, block_size), real_tokens),
        )


def _wants_commit(inputs: DenoiseInputs, state: RowState) -> Bool[Array, " R"]:
    """Returns whether a row must persist its block and could run the next one in that forward."""
    fits = state.context_lens + 2 * state.tokens.shape[1] <= inputs.capacity
    return is_active(inputs, state) & state.is_final & fits


def _update(
    config: StepConfig,
    inputs: DenoiseInputs,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    active: Bool[Array, " R"],
    gathered: Gathered,
) -> tuple[RowState, Gathered]:
    """Returns states and what is gathered after each active row's algorithm saw its proposal."""
    blocks, asked, frames = gathered
    seen = denoise.denoise(config, inputs, lm_head, hidden, state, asked, active)
    rule, trace = seen.updated, seen.updated.trace
    if asked is not None and seen.top is not None:
        top = seen.top.where(trace.written, asked.top)
        asked = dataclasses.replace(asked, top=top.moved(trace.source))
    after, is_broken = rule.block, active & seen.is_invalid
    works = active & ~is_broken
    ended = works & ~state.is_final & has_ended(inputs, state, after.tokens, rule.settled)
    commits = works & ~state.is_final & (rule.is_final | ended)
    steps_of = jnp.where(trace.written, state.step[:, None] + 1, state.steps)
    logprobs = jnp.where(trace.written, trace.logprobs, state.logprobs)
    if trace.source is not None:
        steps_of = interface.move(steps_of, trace.source, 0)
        logprobs = interface.move(logprobs, trace.source, 0.0)
    nfe = state.nfe + active
    blocks = blocks.with_blocks(
        commits,
        state.num_blocks,
        FinishedBlocks(
            tokens=after.tokens[:, None],
            steps=steps_of[:, None],
            logprobs=logprobs[:, None],
            nfe=nfe[:, None],
            top=None if asked is None else jax.tree.map(lambda one: one[:, None], asked.top),
        ),
    )
    updated = dataclasses.replace(
        state,
        tokens=after.tokens,
        masked=after.masked,
        steps=steps_of,
        logprobs=logprobs,
        step=state.step + (works & ~state.is_final),
        extra=after.extra,
        tokens_left=state.tokens_left
        - jnp.where(commits, jnp.sum(state.editable, axis=1, dtype=jnp.int32), 0),
        is_final=state.is_final | commits,
        is_finished=state.is_finished | ended | is_broken,
        is_invalid=state.is_invalid | is_broken,
        num_blocks=state.num_blocks + commits,
        num_edited=state.num_edited + jnp.where(works, trace.num_edited, 0),
        nfe=nfe,
    )
    frames = add(frames, state, updated, works & ~state.is_final)
    moves_on = works & after.done & ~ended & (not config.is_shifted)
    return advance(config, updated, moves_on), (blocks, asked, frames)
