"""Steps of causal families: blocks are denoised, then a causal forward computes their K,V again.

K,V in the context are always those of causal forwards, so blocks begin where the context ends, at
any position. A step forwards one block of every active row. A row whose block is written (`state.
is_final`) sees causally in it; the positions of other blocks see each other. Row i of a causal
forward's logits predicts position i + 1, so this forward may also write the first token of the next
block (`seed_first`). A fresh row begins with the causal forward of its last committed token.

Rules that draft (`DraftingAlgorithm`) leave the last word to the causal forward. Their block begins
with the last token of the output. Where drafts are what the causal forward would have written, they
are accepted, and with them the token that it writes behind the last one. The context grows by the
accepted tokens alone; K,V of the others are overwritten, because the next block begins before them.
If the model has an adapter for drafts, the forwards that make them use it, and no other.

Rows that need their logits draft nothing, since what edits the logits of a position depends on the
tokens before it.

Letters: R rows, L tokens of a block, K blocks that a row can finish in the launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jdllm import decoding
from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.runner import logit_rows
from jdllm.runner.block import denoise, edit_tokens, forward
from jdllm.runner.block.asked import AskedState, remember
from jdllm.runner.block.body import BlockBody
from jdllm.runner.block.frames import add
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.block.outputs import FinishedBlocks, Gathered
from jdllm.runner.block.state import RowState, as_block, has_ended, is_active
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import driver
from jdllm.runner.launch.rows import select


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body(BlockBody):
    """A step of all rows; its variants are how many positions of a block it computes."""

    variants: tuple[int, ...]

    def choose(self, rows: RowState) -> Int32[Array, ""]:
        longest = jnp.max(jnp.where(self.is_active(rows), _length(rows), 0))
        # No array of the sizes: it would be empty where there is one variant (`over_mesh`).
        smaller = [(longest > size).astype(jnp.int32) for size in self.variants[:-1]]
        return sum(smaller, start=jnp.int32(0))

    def step(self, variant: int, carry: driver.Carry) -> driver.Carry:
        config, inputs, state = self.config, self.inputs, carry.rows
        computed_tokens, real_tokens = carry.counts
        blocks, asked, frames = carry.gathered
        if asked is not None:
            asked = remember(asked, state)
        active = is_active(inputs, state)
        drafting = _is_drafting(config, inputs)
        hidden, pools = forward.forward_causal(
            config, self.model, carry.memory, inputs.page_table, state, active, variant, drafting
        )
        computed_tokens += state.tokens.shape[0] * variant
        real_tokens += jnp.sum(jnp.where(active, _length(state), 0), dtype=jnp.int32)
        lm_head, gathered = self.model.unembedding(), (blocks, asked, frames)
        state, gathered = _update(config, inputs, lm_head, hidden, state, active, gathered)
        return dataclasses.replace(
            carry,
            memory=pools,
            rows=state,
            gathered=gathered,
            num_steps=carry.num_steps + 1,
            counts=(computed_tokens, real_tokens),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the forward of a step says about the rows.

    `count` tokens of a written block are accepted. `seed` is the token behind them, [R, 1], with
    its log-probability. `updated` is what denoising did to the other blocks.
    """

    proposed: interface.Proposal
    top: logit_rows.TopTokens | None
    count: Int32[Array, " R"]
    seed: Int32[Array, "R 1"]
    seed_logprob: Float[Array, "R 1"]
    updated: denoise.Updated


def _length(state: RowState) -> Int32[Array, " R"]:
    assert state.length is not None, "rows of a causal family have lengths"
    return state.length


def _drafting_rules(
    config: StepConfig, inputs: DenoiseInputs
) -> Iterator[tuple[interface.DraftingAlgorithm, Bool[Array, " R"]]]:
    """Yields the rules that draft, each with its rows."""
    for i, name in enumerate(config.algorithms):
        algorithm = decoding.BLOCK_ALGORITHMS[name]
        if isinstance(algorithm, interface.DraftingAlgorithm):
            yield algorithm, inputs.algorithm == i


def _is_drafting(config: StepConfig, inputs: DenoiseInputs) -> Bool[Array, " R"]:
    """Returns the rows whose rule drafts."""
    found = jnp.zeros(inputs.slot.shape, bool)
    for _, mine in _drafting_rules(config, inputs):
        found |= mine
    return found


def _next_length(
    config: StepConfig, inputs: DenoiseInputs, asked: Bool[Array, " R"]
) -> Int32[Array, " R"]:
    """Returns the length of the next blocks: L in rows whose rule does not draft."""
    length = jnp.full_like(inputs.slot, config.block_size)
    for algorithm, mine in _drafting_rules(config, inputs):
        wanted = algorithm.block_length(inputs.params, config.block_size)
        length = jnp.where(mine, jnp.where(asked, 1, wanted), length)
    return length


def _see(
    config: StepConfig,
    inputs: DenoiseInputs,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    asked: AskedState | None,
    active: Bool[Array, " R"],
    is_drafting: Bool[Array, " R"],
) -> _Seen:
    """Proposes once for all rows: for masks where they stand, for the others one to the right."""
    place = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    persists, length = state.is_final[:, None], _length(state)
    is_last = place == length[:, None] - 1
    view = dataclasses.replace(
        state,
        tokens=jnp.where(persists, jnp.roll(state.tokens, -1, axis=1), state.tokens),
        masked=jnp.where(persists, place >= length[:, None] - 1, state.masked),
        context_lens=state.context_lens + state.is_final,
        # The draws of a causal forward depend on the position alone, and drafts are to meet them.
        step=jnp.where(state.is_final | is_drafting, 0, state.step),
    )
    before = as_block(inputs, state, active & ~state.is_final)
    seeds = is_drafting | inputs.params.seed_first
    reads_ahead = jnp.where(is_drafting[:, None], place < length[:, None], is_last)
    reads = denoise.reads(config, inputs, state, before) & state.editable
    wanted = jnp.where(persists, reads_ahead & seeds[:, None], reads) & active[:, None]
    proposed, top = denoise.propose(
        config, inputs, lm_head, hidden, view, asked, as_block(inputs, view, active), wanted
    )
    is_met = (proposed.tokens[:, :-1] == state.tokens[:, 1:]) & (place[1:] < length[:, None])
    met = jnp.sum(jnp.cumprod(is_met, axis=1, dtype=jnp.int32), axis=1)
    count = jnp.where(is_drafting, 1 + met, length)
    last = jnp.maximum(count - 1, 0)[:, None]  # padding rows have no block
    return _Seen(
        proposed=proposed,
        top=top,
        count=count,
        seed=jnp.take_along_axis(proposed.tokens, last, axis=1),
        seed_logprob=jnp.take_along_axis(proposed.logprob, last, axis=1),
        updated=denoise.apply_rules(
            config, inputs, state, before, jnp.zeros_like(state.masked), active, proposed,
            edit_tokens.plain_logits(lm_head, hidden),
        ),
    )  # fmt: skip


def _update(
    config: StepConfig,
    inputs: DenoiseInputs,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    active: Bool[Array, " R"],
    gathered: Gathered,
) -> tuple[RowState, Gathered]:
    """Returns states and what is gathered after the forward of each active row's block."""
    blocks, asked, frames = gathered
    place = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    is_asked = jnp.zeros_like(active)
    if inputs.logits is not None:
        is_asked = inputs.logits.is_wanted
    is_drafting = _is_drafting(config, inputs)
    next_length = _next_length(config, inputs, is_asked)
    seen = _see(config, inputs, lm_head, hidden, state, asked, active, is_drafting)
    in_block = (place < _length(state)[:, None])[:, :, None]
    is_broken = active & (
        jnp.any(jnp.isnan(seen.proposed.best_prob), axis=1)
        | jnp.any(jnp.isnan(hidden) & in_block, axis=(1, 2))
    )
    persists = active & ~is_broken & state.is_final
    denoises = active & ~is_broken & ~state.is_final
    updated, trace = seen.updated, seen.updated.trace
    opened = _next_block(config, inputs, state, seen, is_drafting, next_length)
    after = dataclasses.replace(
        state,
        tokens=updated.block.tokens,
        masked=updated.block.masked,
        steps=jnp.where(trace.written, state.step[:, None] + 1, state.steps),
        logprobs=jnp.where(trace.written, trace.logprobs, state.logprobs),
        step=state.step + denoises,
        extra=updated.block.extra,
        is_final=state.is_final | (denoises & updated.is_final),
    )
    after = select(persists, opened, after)
    settled = jnp.where(persists[:, None], ~opened.masked, updated.settled)
    ended = has_ended(inputs, after, after.tokens, settled)
    is_end = jnp.any(seen.proposed.tokens[..., None] == inputs.end_ids[:, None], axis=2)
    ends_early = jnp.any(is_end & (place < seen.count[:, None]), axis=1)
    accepts = persists & is_drafting
    ended = jnp.where(is_drafting, ends_early | (seen.count >= state.tokens_left), ended)
    ended &= accepts | ((persists | denoises) & ~is_drafting)
    # A block that is written is output; of a rule that drafts, what the causal forward accepts.
    written = (persists | denoises) & ~is_drafting & (after.is_final | ended)
    commits = accepts | written
    count = jnp.where(is_drafting, seen.count, config.block_size)
    if asked is not None and seen.top is not None:
        asked = dataclasses.replace(asked, top=_lists(asked.top, seen, trace.written, persists))
    mine = accepts[:, None]
    nfe = state.nfe + active
    blocks = blocks.with_blocks(
        commits,
        state.num_blocks,
        FinishedBlocks(
            tokens=jnp.where(mine, seen.proposed.tokens, after.tokens)[:, None],
            steps=jnp.where(mine, 1, after.steps)[:, None],
            logprobs=jnp.where(mine, seen.proposed.logprob, after.logprobs)[:, None],
            nfe=nfe[:, None],
            top=None if asked is None else jax.tree.map(lambda one: one[:, None], asked.top),
            counts=count[:, None],
        ),
    )
    after = dataclasses.replace(
        after,
        tokens_left=state.tokens_left - jnp.where(commits, count, 0),
        is_finished=state.is_finished | ended | is_broken,
        is_invalid=state.is_invalid | is_broken,
        num_blocks=state.num_blocks + commits,
        nfe=nfe,
    )
    shows = (denoises | (persists & inputs.params.seed_first)) & ~is_drafting
    frames = add(frames, state, after, shows)
    return after, (blocks, asked, frames)


def _next_block(
    config: StepConfig,
    inputs: DenoiseInputs,
    state: RowState,
    seen: _Seen,
    is_drafting: Bool[Array, " R"],
    length: Int32[Array, " R"],
) -> RowState:
    """Returns the states in which all rows have moved on to their next blocks."""
    place = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    is_seed = (place == 0) & (is_drafting | inputs.params.seed_first)[:, None]
    masked = (place < length[:, None]) & ~is_seed
    return dataclasses.replace(
        state,
        tokens=jnp.where(is_seed, seen.seed, config.mask_token_id),
        masked=masked,
        # A rule that drafts has its first token in the output already.
        editable=(place < length[:, None]) & ~(is_seed & is_drafting[:, None]),
        steps=jnp.ones_like(state.steps),
        logprobs=jnp.broadcast_to(seen.seed_logprob, state.logprobs.shape),
        step=jnp.any(is_seed, axis=1).astype(jnp.int32),
        extra=jax.tree.map(jnp.zeros_like, state.extra),
        context_lens=state.context_lens + seen.count,
        length=length,
        is_final=~jnp.any(masked, axis=1),
    )


def _lists(
    old: logit_rows.TopTokens,
    seen: _Seen,
    written: Bool[Array, "R L"],
    persists: Bool[Array, " R"],
) -> logit_rows.TopTokens:
    """Returns the lists of the blocks; a block that begins has that of its first token."""
    assert seen.top is not None, "the caller has checked it"
    last = jnp.maximum(seen.count - 1, 0)
    source = jnp.broadcast_to(last[:, None], written.shape)
    column = jnp.broadcast_to(persists[:, None], written.shape)
    return seen.top.moved(source).where(column, seen.top.where(written, old))
