"""JointThresholdInDel: JointThreshold for models that also delete positions and insert new ones.

This is the rule of LLaDA2.2 (SGLang 0.5.23, `dllm/algorithm/joint_threshold_indel.py`). A written
DELETE drops its position. A written SPLIT puts a mask before the token that stood there. Both only
move tokens inside the block: what is pushed past its end is lost, and masks fill it up. An edit may
also write the mask again. So a block that is final has as many tokens as any other.

Positions that were masked when the block began (and not inserted later) are *original*. A step
without an original mask counts towards `max_post_edit_steps`; when they are used up, or after T +
`max_post_edit_steps` steps, a last round fills all masks with ordinary tokens. If a row meets a
block that it has met before, one position takes a token that it has never had (the anti-loop rule).

Letters: B rows, T block length, S steps that a row remembers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from jdllm.algorithms import lookup
from jdllm.decoding.block import interface


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a step writes: `tokens` with `prob` at the positions `fill` and `edit`.

    `answers`: the row met this block before, so `place` takes a token that it never had.
    """

    tokens: Int32[Array, "B T"]
    prob: Float[Array, "B T"]
    fill: Bool[Array, "B T"]
    edit: Bool[Array, "B T"]
    original: Bool[Array, "B T"]
    is_last: Bool[Array, " B"]
    answers: Bool[Array, " B"]
    place: Int32[Array, " B"]
    num_steps: Int32[Array, " B"]
    post_edit_steps: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True, slots=True)
class JointThresholdInDel:
    """Fills masks, edits, inserts and deletes; needs at most T + max_post_edit_steps + 2 updates.

    A drawn token is a sample, not a mistake, so no edit reverts it; draws never give the mask. Only
    masked positions draw, and the last round draws ordinary tokens only.
    """

    persists_apart = True
    forwards_parts = False

    def init_extra(self, num_rows: int, block_size: int) -> dict[str, Any]:
        option = lookup.TABLE["JointThresholdInDel"].option("max_post_edit_steps")
        assert option is not None
        remembered = (num_rows, block_size + int(option.high) + 2, block_size)
        flags, counts = (num_rows, block_size), (num_rows,)
        return {
            "post_edit_steps": jnp.zeros(counts, jnp.int32),
            "num_steps": jnp.zeros(counts, jnp.int32),
            "is_finished": jnp.zeros(counts, bool),
            "is_inserted": jnp.zeros(flags, bool),
            "is_drawn": jnp.zeros(flags, bool),
            # The block before each step, and 1 + the token that each step wrote (0: none).
            "met": jnp.zeros(remembered, jnp.int32),
            "written": jnp.zeros(remembered, jnp.int32),
            "trace": interface.no_trace(num_rows, block_size),
        }

    def question(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.Question:
        """Asks for the best token that the anti-loop position has never had.

        A position that is an original mask must not stay masked either.
        """
        plan = _plan(block, proposal)
        rows = jnp.arange(block.tokens.shape[0])
        had = block.extra["written"][rows, :, plan.place] - 1  # [B, S]
        mask = jnp.where(plan.original[rows, plan.place], _edits(proposal).mask_id, -1)
        return interface.Question(
            wants=plan.answers,
            place=plan.place,
            excluded=jnp.concatenate([had, mask[:, None]], axis=1),
        )

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes, then moves tokens. A row is done when a step began with its final tokens.

        `proposal.edits.answer` answers `question`.
        """
        plan, edits, extra = _plan(block, proposal), _edits(proposal), block.extra
        T = block.tokens.shape[1]
        place = jnp.arange(T, dtype=jnp.int32)
        active = ~block.done & ~extra["is_finished"]
        selected = (plan.fill | plan.edit) & active[:, None]
        escapes = plan.answers[:, None] & (place == plan.place[:, None])
        new = jnp.where(escapes, edits.answer[:, None], plan.tokens)
        tokens = jnp.where(selected, new, block.tokens)
        is_drawn = extra["is_drawn"] | (plan.fill & selected & proposal.is_drawn[:, None])

        is_delete, is_split = (
            selected & (tokens == token) for token in (edits.delete_id, edits.split_id)
        )
        source = _moves(is_delete, is_split)
        kept = jnp.where(is_split, block.tokens, tokens)
        is_drawn = jnp.where(is_split, extra["is_drawn"], is_drawn)
        moved = interface.move(kept, source, edits.mask_id)

        is_quiet = ~jnp.any(selected, axis=1)
        finishes = active & (plan.is_last | is_quiet)
        unchanged = jnp.all(moved == block.tokens, axis=1)
        at = (jnp.arange(block.tokens.shape[0]), extra["num_steps"])
        logprobs = jnp.where(new == edits.plain, edits.plain_logprob, proposal.best_logprob)
        is_mine = plan.fill & proposal.is_drawn[:, None] & (new == proposal.tokens)
        logprobs = jnp.where(is_mine, proposal.logprob, logprobs)
        return dataclasses.replace(
            block,
            tokens=moved,
            masked=jnp.where(
                active[:, None], block.editable & (moved == edits.mask_id), block.masked
            ),
            done=block.done | extra["is_finished"] | (finishes & unchanged),
            extra={
                "post_edit_steps": jnp.where(
                    active, plan.post_edit_steps, extra["post_edit_steps"]
                ),
                "num_steps": jnp.where(active, plan.num_steps, extra["num_steps"]),
                "is_finished": extra["is_finished"] | finishes,
                "is_inserted": interface.move(extra["is_inserted"], source, True),
                "is_drawn": interface.move(is_drawn, source, False),
                "met": _remember(extra["met"], at, block.tokens, active),
                "written": _remember(
                    extra["written"], at, jnp.where(selected, tokens + 1, 0), active
                ),
                "trace": interface.Trace(
                    written=selected & ~is_delete & ~is_split & (tokens != edits.mask_id),
                    logprobs=jnp.where(escapes, edits.answer_logprob[:, None], logprobs),
                    num_edited=jnp.sum(
                        plan.edit & selected & (tokens != block.tokens), axis=1, dtype=jnp.int32
                    ),
                    source=source,
                ),
            },
        )

    def trace(self, updated: interface.BlockState) -> interface.Trace:
        return updated.extra["trace"]

    def is_final(self, block: interface.BlockState) -> Bool[Array, " B"]:
        return block.done | block.extra["is_finished"]

    def reads(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return ~self.settled(block)

    def forwards(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return jnp.ones_like(block.masked)

    def settled(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return jnp.broadcast_to(self.is_final(block)[:, None], block.masked.shape)


def _edits(proposal: interface.Proposal) -> interface.EditProposal:
    assert proposal.edits is not None, "the model has no edit tokens"
    return proposal.edits


def _plan(block: interface.BlockState, proposal: interface.Proposal) -> _Plan:
    """Returns what the step writes, but for the answer to its question."""
    edits, extra, masked = _edits(proposal), block.extra, block.masked
    T = masked.shape[1]
    active = ~block.done & ~extra["is_finished"]
    original = masked & ~extra["is_inserted"]
    count = jnp.sum(masked, axis=1)
    has_original = jnp.any(original, axis=1)
    budget = block.params.max_post_edit_steps
    num_steps = extra["num_steps"] + 1
    post_edit_steps = extra["post_edit_steps"] + ~has_original
    is_last = jnp.where(budget > 0, post_edit_steps >= budget, ~has_original)
    is_last |= num_steps > T + budget

    prefers_mask = (edits.mask_logprob > proposal.best_logprob) | (
        (edits.mask_logprob == proposal.best_logprob) & (edits.mask_id < proposal.best)
    )
    # The best ordinary or edit token stands in at an original mask, at its own probability.
    stays = prefers_mask & ~(original & ~is_last[:, None])
    tokens = jnp.where(stays, edits.mask_id, proposal.best)
    prob = jnp.where(stays, jnp.exp(edits.mask_logprob), proposal.best_prob)
    draws = masked & proposal.is_drawn[:, None]
    tokens = jnp.where(draws, proposal.tokens, tokens)
    prob = jnp.where(draws, proposal.prob, prob)

    confident = masked & (prob > block.params.threshold[:, None])
    least = 1 + count - jnp.sum(original, axis=1)
    enough = jnp.sum(confident, axis=1) >= least
    fill = jnp.where(enough[:, None], confident, masked & (_rank(masked, prob) < least[:, None]))
    fill = jnp.where((is_last | ~has_original)[:, None], masked, fill)
    ends = (budget == 0) & has_original & ~jnp.any(original & ~fill, axis=1)
    is_last |= ends
    fill = jnp.where(ends[:, None], masked, fill)
    edit = (
        block.editable
        & ~masked
        & ~extra["is_drawn"]
        & (prob > block.params.edit_threshold[:, None])
        & (tokens != block.tokens)
    )
    selected = (fill | edit) & active[:, None]

    is_special = (tokens == edits.mask_id) | (tokens == edits.delete_id)
    is_special |= tokens == edits.split_id
    changes = selected & (tokens != block.tokens)
    tokens = jnp.where(is_last[:, None] & is_special, edits.plain, tokens)
    past = jnp.arange(extra["met"].shape[1]) < extra["num_steps"][:, None]  # [B, S]
    was_met = jnp.any(past & jnp.all(extra["met"] == block.tokens[:, None], axis=2), axis=1)
    return _Plan(
        tokens=tokens,
        prob=prob,
        fill=fill,
        edit=edit,
        original=original,
        is_last=is_last,
        answers=was_met & ~is_last & jnp.any(changes, axis=1),
        place=jnp.argmin(jnp.where(changes, prob, jnp.inf), axis=1).astype(jnp.int32),
        num_steps=num_steps,
        post_edit_steps=post_edit_steps,
    )


def _rank(masked: Bool[Array, "B T"], prob: Float[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns how many masked positions are more probable; ties go to the lower position."""
    score = jnp.where(masked, prob, -1.0)
    place = jnp.arange(score.shape[1])
    higher = score[:, None, :] > score[:, :, None]  # [B, position, other]
    tied = (score[:, None, :] == score[:, :, None]) & (place[None, :] < place[:, None])
    return jnp.sum(masked[:, None, :] & (higher | tied), axis=2)


def _moves(is_delete: Bool[Array, "B T"], is_split: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns for each position where its token stood before the moves; T where a mask is new."""
    B, T = is_delete.shape
    count = jnp.where(is_delete, 0, jnp.where(is_split, 2, 1))
    start = jnp.cumsum(count, axis=1) - count
    # A split token follows its new mask. Deleted tokens and those past the end go to a sink.
    target = jnp.where(is_delete, 2 * T, start + is_split)
    rows, place = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
    source = jnp.full((B, 2 * T + 1), T, jnp.int32).at[rows, target].set(place[None, :])
    return source[:, :T]


def _remember(
    past: Int32[Array, "B S T"],
    at: tuple[Int[Array, " B"], Int32[Array, " B"]],
    now: Int32[Array, "B T"],
    active: Bool[Array, " B"],
) -> Int32[Array, "B S T"]:
    rows, step = at
    step = jnp.where(active, step, past.shape[1])  # out of bounds: dropped
    return past.at[rows, step].set(now, mode="drop")
