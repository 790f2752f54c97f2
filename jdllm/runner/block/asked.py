"""Block rows that need their logits: their proposals from edited logits, and the best tokens.

Their state beyond `RowState` is the tokens of the row, which the penalties count, and the lists of
the block in flight. It lies in slots of its own, which only launches with such rows read.

A row that only wants lists keeps the proposal of the streamed vocabulary, so asking for
lists never changes a token.

Letters: R rows, L tokens of a block, S tokens of the longest row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.runner import logit_rows
from jdllm.runner.block import edit_tokens, sampling
from jdllm.runner.block import proposal as proposal_lib
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.block.proposal import previous_tokens
from jdllm.runner.block.state import RowState
from jdllm.runner.config import StepConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedState:
    """What rows that need their logits carry; every leaf leads with R.

    `history`: the tokens of the row before its block; later ones are arbitrary. `top`: the lists of
    the block, for each token those of the step that wrote it last.
    """

    history: Int32[Array, "R S"]
    top: logit_rows.TopTokens


def empty_slots(num_slots: int, config: StepConfig) -> AskedState:
    """Returns states before the first launch; nobody reads their values."""
    return AskedState(
        history=jnp.zeros((num_slots, config.block_context), jnp.int32),
        top=logit_rows.no_tokens(num_slots, config.block_size),
    )


def enter(inputs: DenoiseInputs, slots: AskedState) -> AskedState:
    """Returns the rows' states at the start of a launch: those of their slots, or new ones."""
    assert inputs.history is not None, "only launches with logits come here"
    last = slots.history.shape[0] - 1
    kept = jax.tree.map(lambda leaf: leaf[jnp.minimum(inputs.slot, last)], slots)
    history = jnp.where(inputs.is_fresh[:, None], inputs.history, kept.history)
    return dataclasses.replace(kept, history=history)


def leave(inputs: DenoiseInputs, slots: AskedState, rows: AskedState) -> AskedState:
    """Returns the slots with the rows' states written; padding rows are dropped."""
    return jax.tree.map(lambda old, new: old.at[inputs.slot].set(new, mode="drop"), slots, rows)


def remember(asked: AskedState, state: RowState) -> AskedState:
    """Returns the state with the tokens of the present block in the history.

    A step calls this before the rows move on: a block has its final tokens then.
    """
    R, L = state.tokens.shape
    place = state.context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)
    row = jnp.arange(R, dtype=jnp.int32)[:, None]
    history = asked.history.at[row, place].set(state.tokens, mode="drop")
    return dataclasses.replace(asked, history=history)


def propose(
    config: StepConfig,
    inputs: DenoiseInputs,
    asked: AskedState,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    block: interface.BlockState,
    wanted: Bool[Array, "R L"],
) -> tuple[interface.Proposal, logit_rows.TopTokens]:
    """Returns the proposal of all rows, and lists for the wanted positions of rows that ask."""
    assert inputs.logits is not None, "only launches with logits come here"
    R, L = state.tokens.shape
    is_asked, edits = inputs.logits.is_wanted, inputs.logits.edits
    positions = state.context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)
    samples = inputs.sampling.temperature > 0
    greedy = dataclasses.replace(
        inputs.sampling, temperature=jnp.where(is_asked, 0.0, inputs.sampling.temperature)
    )
    streamed = proposal_lib.propose(
        hidden,
        lm_head,
        block,
        positions,
        state.step,
        greedy,
        wanted & ~edits[:, None],
        forbidden_ids=config.forbidden_ids,
        special=edit_tokens.special(config),
        implementation=config.implementation,
    )
    (rows,) = jnp.nonzero(is_asked & jnp.any(wanted, axis=1), size=R, fill_value=0)

    def one_row(
        i: Int32[Array, ""], carry: tuple[interface.Proposal, logit_rows.TopTokens]
    ) -> tuple[interface.Proposal, logit_rows.TopTokens]:
        proposal, top = carry
        r = rows[i]
        mine, listed = _propose_row(
            config,
            _row_of(inputs.logits, r),
            _row_of(inputs.sampling, r),
            _row(r, hidden, asked, state, block, wanted),
            _row_of(proposal, r),
            lm_head,
        )
        put = functools.partial(jax.tree.map, lambda old, new: old.at[r].set(new))
        return put(proposal, mine), put(top, listed)

    count = jnp.sum(is_asked & jnp.any(wanted, axis=1))
    # One turn for each row that asks, as for rows that draw.
    proposal, top = jax.lax.fori_loop(0, count, one_row, (streamed, logit_rows.no_tokens(R, L)))
    return dataclasses.replace(proposal, is_drawn=samples), top


def logits_at(
    inputs: DenoiseInputs,
    asked: AskedState,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    block: interface.BlockState,
) -> edit_tokens.LogitsAt:
    """Returns the function that gives the edited logits of a position, for questions of a rule."""
    logits, wanted = inputs.logits, jnp.zeros_like(state.masked)
    assert logits is not None, "only launches with logits come here"

    def at(r: Int32[Array, ""], place: Int32[Array, ""]) -> Float[Array, " V"]:
        row = _row(r, hidden, asked, state, block, wanted)
        return _row_logits(_row_of(logits, r), row, lm_head)[place]

    return at


def _row(
    r: Int32[Array, ""],
    hidden: Float[Array, "R L D"],
    asked: AskedState,
    state: RowState,
    block: interface.BlockState,
    wanted: Bool[Array, "R L"],
) -> _Row:
    return _Row(
        hidden=hidden[r],
        history=asked.history[r],
        block=_row_of(dataclasses.replace(block, extra=()), r),
        start=state.context_lens[r],
        step=state.step[r],
        wanted=wanted[r],
    )


def _row_of(tree: Any, r: Int32[Array, ""]) -> Any:
    return jax.tree.map(lambda leaf: leaf[r], tree)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row in one step: `start` is the position of its block, `history` its tokens so far."""

    hidden: Float[Array, "L D"]
    history: Int32[Array, " S"]
    block: interface.BlockState
    start: Int32[Array, ""]
    step: Int32[Array, ""]
    wanted: Bool[Array, " L"]

    def context(self, options: logit_rows.LogitRows, vocab_size: int) -> logit_rows.Context:
        """Returns what the penalties count."""
        S, L = self.history.shape[0], self.wanted.shape[0]
        place = jnp.arange(S, dtype=jnp.int32)
        tokens = self.history.at[self.start + jnp.arange(L)].set(self.block.tokens, mode="drop")
        is_known = (
            (place < self.start).at[self.start + jnp.arange(L)].set(~self.block.masked, mode="drop")
        )
        is_prompt = place < options.prompt_len
        return logit_rows.context(options, tokens, is_prompt, is_known & ~is_prompt, vocab_size)


def _row_logits(
    options: logit_rows.LogitRows, row: _Row, lm_head: unembedding.LMHead
) -> Float[Array, "L V"]:
    """Returns the logits of one row's block as its options edit them."""
    L, V = row.wanted.shape[0], lm_head.vocab_size
    tokens = row.block.tokens
    at = jnp.arange(L, dtype=jnp.int32)
    logits = lm_head.logits(row.hidden)
    left = previous_tokens(tokens[None])[0]
    penalty = jnp.where(at > 0, row.block.params.penalty_lambda, 0.0)
    logits = logits.at[at, left].add(-penalty)
    edited = logit_rows.edit(options, logits, row.context(options, V), row.start + at, tokens)
    return jnp.where(options.edits, edited, logits)


def _propose_row(
    config: StepConfig,
    options: logit_rows.LogitRows,
    draw: sampling.SamplingRows,
    row: _Row,
    streamed: interface.Proposal,
    lm_head: unembedding.LMHead,
) -> tuple[interface.Proposal, logit_rows.TopTokens]:
    """Returns the proposal [L] and the lists of one row; `streamed` is its proposal so far."""
    L, tokens = row.wanted.shape[0], row.block.tokens
    at = jnp.arange(L, dtype=jnp.int32)
    positions = row.start + at
    logits = _row_logits(options, row, lm_head)
    special, edits = edit_tokens.special(config), streamed.edits
    if special is None:
        stats = pallas_kernels.logits_stats(logits, forbidden_ids=config.forbidden_ids)
    else:
        plain = pallas_kernels.logits_stats(logits, forbidden_ids=special.ids)
        special_logits = logits[:, jnp.array(special.ids)]
        stats = special.with_edits(plain, special_logits)
        mine = _row_of(special.proposal(plain, special_logits, (1, L)), jnp.int32(0))
        edits = jax.tree.map(lambda a, b: jnp.where(options.edits, a, b), mine, streamed.edits)

    best = jnp.where(row.wanted & options.edits, stats.best_id, streamed.best)
    best_prob = pallas_kernels.probability(stats.best_logit, stats.logsumexp)
    best_prob = jnp.where(options.edits, jnp.where(row.wanted, best_prob, 0.0), streamed.best_prob)

    def draw_tokens(_, carry):
        del carry
        allowed = logits
        for token_id in config.forbidden_ids:
            allowed = allowed.at[:, token_id].set(sampling.NEVER)
        drawn, relative, share = sampling.draw_row(
            allowed, positions, row.step, draw, options.min_p
        )
        return (
            jnp.where(row.wanted, drawn, tokens),
            jnp.where(row.wanted, relative, 1.0),
            jnp.where(row.wanted, share, 0.0),
        )

    draws = (draw.temperature > 0).astype(jnp.int32)
    proposed, relative, draw_prob = jax.lax.fori_loop(
        0, draws, draw_tokens, (best, jnp.ones((L,), jnp.float32), best_prob)
    )
    mine = dataclasses.replace(
        streamed,
        tokens=proposed,
        prob=jnp.minimum(best_prob, relative),
        best=best,
        best_prob=best_prob,
        logprob=logits[at, proposed] - stats.logsumexp,
        best_logprob=logits[at, best] - stats.logsumexp,
        draw_prob=draw_prob,
        entropy=jnp.where(options.edits, stats.entropy, streamed.entropy),
        edits=edits,
    )
    listed = logit_rows.top_tokens(logits, stats.logsumexp, options.num_top, config.forbidden_ids)
    return mine, listed
