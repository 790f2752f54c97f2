"""What a step's proposal changes in its rows: one proposal, and the rule of each row.

Letters: R rows, L tokens of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jdllm import decoding
from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.runner import logit_rows
from jdllm.runner.block import asked as asked_lib
from jdllm.runner.block import edit_tokens, proposal
from jdllm.runner.block.asked import AskedState
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.block.state import RowState, as_block, predicted
from jdllm.runner.config import StepConfig
from jdllm.runner.launch.rows import select


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What the rules of the rows made of a proposal."""

    block: interface.BlockState
    is_final: Bool[Array, " R"]
    settled: Bool[Array, "R L"]
    trace: interface.Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """What a step's proposal changed in the rows.

    `top` are the lists of rows that ask, `is_invalid`: numbers of the row are NaN.
    """

    updated: Updated
    is_invalid: Bool[Array, " R"]
    top: logit_rows.TopTokens | None


def denoise(
    config: StepConfig,
    inputs: DenoiseInputs,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    asked: AskedState | None,
    active: Bool[Array, " R"],
) -> Denoised:
    """Proposes once, runs every compiled algorithm, and keeps for each row its own result."""
    predicts = predicted(config, state)
    later = state.masked & ~predicts  # masks that no rule sees in this step
    whole = as_block(inputs, state, active)
    before = dataclasses.replace(whole, masked=state.masked & predicts)
    wanted = reads(config, inputs, state, before) & predicts & state.editable & active[:, None]
    proposed, top = propose(config, inputs, lm_head, hidden, state, asked, before, wanted)
    logits_at = edit_tokens.plain_logits(lm_head, hidden)
    if asked is not None and config.moves_tokens:
        logits_at = asked_lib.logits_at(inputs, asked, lm_head, hidden, state, before)
    return Denoised(
        updated=apply_rules(config, inputs, state, before, later, active, proposed, logits_at),
        # Also by the hidden states: a forward that only persists K,V proposes nothing.
        is_invalid=jnp.any(jnp.isnan(proposed.best_prob), axis=1)
        | jnp.any(jnp.isnan(hidden), axis=(1, 2)),
        top=top,
    )


def reads(
    config: StepConfig,
    inputs: DenoiseInputs,
    state: RowState,
    before: interface.BlockState,
) -> Bool[Array, "R L"]:
    """Returns the positions for which the rule of each row needs a proposal."""
    read = jnp.zeros_like(state.masked)
    for i, name in enumerate(config.algorithms):
        mine = dataclasses.replace(before, extra=state.extra[i])
        is_mine = (inputs.algorithm == i)[:, None]
        read |= is_mine & decoding.BLOCK_ALGORITHMS[name].reads(mine)
    return read


def propose(
    config: StepConfig,
    inputs: DenoiseInputs,
    lm_head: unembedding.LMHead,
    hidden: Float[Array, "R L D"],
    state: RowState,
    asked: AskedState | None,
    block: interface.BlockState,
    wanted: Bool[Array, "R L"],
) -> tuple[interface.Proposal, logit_rows.TopTokens | None]:
    """Returns the proposal for the wanted positions, and the lists of rows that ask.

    Of the state it reads where the blocks begin and the numbers of their steps.
    """
    if asked is not None:
        return asked_lib.propose(config, inputs, asked, lm_head, hidden, state, block, wanted)
    L = state.tokens.shape[1]
    proposed = proposal.propose(
        hidden,
        lm_head,
        block,
        state.context_lens[:, None] + jnp.arange(L, dtype=jnp.int32),
        state.step,
        inputs.sampling,
        wanted,
        forbidden_ids=config.forbidden_ids,
        special=edit_tokens.special(config),
        implementation=config.implementation,
    )
    return proposed, None


def apply_rules(
    config: StepConfig,
    inputs: DenoiseInputs,
    state: RowState,
    before: interface.BlockState,
    later: Bool[Array, "R L"],
    active: Bool[Array, " R"],
    proposed: interface.Proposal,
    logits_at: edit_tokens.LogitsAt,
) -> Updated:
    """Runs every compiled algorithm on the blocks, and keeps for each row its own result.

    `later` are masks that no rule sees in this step.
    """
    R, L = state.tokens.shape
    whole = dataclasses.replace(before, masked=before.masked | later)
    after, extras, trace = before, [], interface.trace_of_writes(whole, whole, proposed)
    if config.moves_tokens:
        trace = dataclasses.replace(trace, source=jnp.broadcast_to(jnp.arange(L), (R, L)))
    is_final, settled = jnp.zeros_like(active), jnp.zeros_like(state.masked)
    for i, name in enumerate(config.algorithms):
        algorithm = decoding.BLOCK_ALGORITHMS[name]
        mine = dataclasses.replace(before, extra=state.extra[i])
        is_mine = inputs.algorithm == i
        if isinstance(algorithm, interface.MovingAlgorithm):
            question = algorithm.question(mine, proposed)
            question = dataclasses.replace(question, wants=question.wants & is_mine & active)
            answered = edit_tokens.answered(proposed, question, logits_at)
            updated = algorithm.update(mine, answered)
            did = algorithm.trace(updated)
        else:
            updated = algorithm.update(mine, proposed)
            updated = dataclasses.replace(updated, masked=updated.masked | later)
            did = interface.trace_of_writes(whole, updated, proposed)
            did = dataclasses.replace(did, source=trace.source)
        trace = select(is_mine, did, trace)
        extras.append(updated.extra)
        is_final = jnp.where(is_mine, algorithm.is_final(updated), is_final)
        settled = jnp.where(is_mine[:, None], algorithm.settled(updated), settled)
        after = select(is_mine, dataclasses.replace(updated, extra=()), after)
    return Updated(
        block=dataclasses.replace(after, extra=tuple(extras)),
        is_final=is_final,
        settled=settled,
        trace=trace,
    )
