"""The array interface between step functions and decoding algorithms.

An algorithm is a pure `update` of a `BlockState` from a `Proposal`; it sees no page, no request
and no other row's logits. The frozen dataclass that implements `Algorithm` holds the structure
(which rule), so the structure is part of the compiled step. Every option of a request is a `[B]`
array in `BlockParams`, so a new value never compiles a step again.

Letters: B rows, T block length (one position per token).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from jdllm.algorithms import lookup

# One field per option. Its type is Any, since a type checker cannot know the fields.
_Options: Any = dataclasses.make_dataclass(
    "BlockOptions",
    [(name, jax.Array) for name in lookup.arrays_of(lookup.BLOCK)],
    frozen=True,
    slots=True,
    kw_only=True,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockParams(_Options):
    """The options of all block algorithms, [B] each; a rule reads only its own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """The block that each row denoises; the first axis of every leaf is B.

    masked: not written yet. editable: may change at all (False on the prompt's tail
    and on padding). done: the last forward wrote the K,V of the final tokens.
    extra: the algorithm's own state, zeros at the start of a block.
    """

    tokens: Int32[Array, "B T"]
    masked: Bool[Array, "B T"]
    editable: Bool[Array, "B T"]
    done: Bool[Array, " B"]
    params: BlockParams
    extra: Any

    def write(self, tokens: Int[Array, "B T"], *, where: Bool[Array, "B T"]) -> BlockState:
        """Writes `tokens` at editable positions of unfinished rows, and unmasks these positions."""
        where = where & self.editable & ~self.done[:, None]
        return dataclasses.replace(
            self,
            tokens=jnp.where(where, tokens, self.tokens),
            masked=self.masked & ~where,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EditProposal:
    """What the model says of the mask and of its edit tokens, for rules that move tokens.

    `mask_logprob` is the log-probability of the mask. `plain` is the best token that is neither the
    mask nor an edit token. `answer` is the answer to the rule's question, if it asks one.
    """

    mask_id: int = dataclasses.field(metadata={"static": True})
    delete_id: int = dataclasses.field(metadata={"static": True})
    split_id: int = dataclasses.field(metadata={"static": True})
    mask_logprob: Float32[Array, "B T"]
    plain: Int32[Array, "B T"]
    plain_logprob: Float32[Array, "B T"]
    logsumexp: Float32[Array, "B T"]
    answer: Int32[Array, " B"]
    answer_logprob: Float32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the model suggests for positions that can still change, aligned to the position.

    A position that cannot change holds its own token with probability 0; its log-probabilities
    have no meaning. `tokens`/`prob`: the token for a masked position (drawn if the row samples)
    and its probability, which the threshold applies to. `best`/`best_prob`: the argmax and its
    probability, for edits. `is_drawn`: the row samples. The mask id is never proposed. `logprob`
    and `best_logprob`: the log-probabilities of `tokens` and `best` at temperature 1, under the
    logits of the choice (penalty included). `draw_prob`: the probability of `tokens` in the
    distribution that it was drawn from (tempered and filtered), or `best_prob` in greedy rows.
    `entropy`, in nats: that of the whole vocabulary at temperature 1, the penalty lambda left out.
    `edits` is there if a rule that moves tokens is compiled.
    """

    tokens: Int32[Array, "B T"]
    prob: Float32[Array, "B T"]
    best: Int32[Array, "B T"]
    best_prob: Float32[Array, "B T"]
    is_drawn: Bool[Array, " B"]
    logprob: Float32[Array, "B T"]
    best_logprob: Float32[Array, "B T"]
    draw_prob: Float32[Array, "B T"]
    entropy: Float32[Array, "B T"]
    edits: EditProposal | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Asks, for the rows of `wants`, which token is best at `place` but for those `excluded`.

    An excluded id of -1 excludes nothing.
    """

    wants: Bool[Array, " B"]
    place: Int32[Array, " B"]
    excluded: Int32[Array, "B X"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a step did to a block.

    `written`: positions, before any move, whose token the step wrote, with the log-probability
    `logprobs`. `source`: where each token stood before the step, T for a new mask; None if the rule
    never moves a token.
    """

    written: Bool[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    num_edited: Int32[Array, " B"]
    source: Int32[Array, "B T"] | None = None


@runtime_checkable
class Algorithm(Protocol):
    """A rule; frozen dataclasses implement it, so it is hashable and static under jit.

    `persists_apart`: after a block is final, one more forward writes its K,V. `forwards_parts`:
    `forwards` may leave positions out.
    """

    persists_apart: bool
    forwards_parts: bool

    def init_extra(self, num_rows: int, block_size: int) -> Any:
        """Returns the `extra` of `num_rows` fresh blocks, all zeros."""
        ...

    def update(self, block: BlockState, proposal: Proposal) -> BlockState:
        """Returns the block after one step; rows that are done stay as they are."""
        ...

    def is_final(self, block: BlockState) -> Bool[Array, " B"]:
        """Returns whether the row's tokens will not change any more."""
        ...

    def settled(self, block: BlockState) -> Bool[Array, "B T"]:
        """Returns whether the token of the position will not change any more."""
        ...

    def reads(self, block: BlockState) -> Bool[Array, "B T"]:
        """Returns the positions for which the next update needs a proposal; it asks for no other.

        None of them is `settled`.
        """
        ...

    def forwards(self, block: BlockState) -> Bool[Array, "B T"]:
        """Returns the positions that the next forward computes.

        They see K,V of the others as the last forward that computed these has left them. A position
        that is read must be among them; with shifted logits, the one before it. Whatever the rule
        says, the first forward of a block and the one that persists it compute all.
        """
        ...


@runtime_checkable
class MovingAlgorithm(Algorithm, Protocol):
    """A rule that moves tokens inside the block, so it must say what it did.

    The step answers its question before it calls `update`.
    """

    def question(self, block: BlockState, proposal: Proposal) -> Question:
        """Returns the one question that each row may ask about the logits of a position."""
        ...

    def trace(self, updated: BlockState) -> Trace:
        """Returns what the `update` that gave this block did."""
        ...


@runtime_checkable
class DraftingAlgorithm(Algorithm, Protocol):
    """A rule for causal families whose output is what causal forwards say, token by token.

    A block begins with the last token of the output; the rule fills the positions behind it with
    drafts. The causal forward of the block accepts the drafts that it would have written itself,
    and gives one token more.
    """

    def block_length(self, params: BlockParams, most: int) -> Int32[Array, " B"]:
        """Returns the positions of a block, from 1 to `most`."""
        ...


def trace_of_writes(before: BlockState, after: BlockState, proposal: Proposal) -> Trace:
    """Returns what a rule did that moves no token."""
    edited = ~before.masked & (after.tokens != before.tokens)
    filled = before.masked & ~after.masked
    return Trace(
        written=filled | edited,
        # An edit writes the best token; a masked position gets the token that was drawn for it.
        logprobs=jnp.where(filled, proposal.logprob, proposal.best_logprob),
        num_edited=jnp.sum(edited, axis=1, dtype=jnp.int32),
    )


def no_trace(num_rows: int, block_size: int) -> Trace:
    """Returns the trace of rows before their first step; nobody reads its values."""
    return Trace(
        written=jnp.zeros((num_rows, block_size), bool),
        logprobs=jnp.zeros((num_rows, block_size), jnp.float32),
        num_edited=jnp.zeros((num_rows,), jnp.int32),
        source=jnp.zeros((num_rows, block_size), jnp.int32),
    )


def move(
    values: Shaped[Array, "B T"], source: Int32[Array, "B T"], new: int | bool | float
) -> Shaped[Array, "B T"]:
    """Returns the values of a block's positions after its tokens moved; see `Trace.source`."""
    T = values.shape[1]
    kept = jnp.take_along_axis(values, jnp.minimum(source, T - 1), axis=1)
    return jnp.where(source < T, kept, new)


def select_masked(
    masked: Bool[Array, "B T"], prob: Float[Array, "B T"], threshold: Float[Array, " B"]
) -> Bool[Array, "B T"]:
    """Returns the masked positions whose `prob` exceeds the row's threshold, at least one.

    If no position does, the result is the most probable masked one, the lowest position on a tie.
    In a row without a masked position it is empty.
    """
    return at_least_one(masked, prob, prob > threshold[:, None])


def at_least_one(
    masked: Bool[Array, "B T"], prob: Float[Array, "B T"], chosen: Bool[Array, "B T"]
) -> Bool[Array, "B T"]:
    """Returns the masked positions among the `chosen` ones, or else the most probable masked one.

    On a tie that is the lowest position. In a row without a masked position the result is empty.
    """
    chosen = masked & chosen
    score = jnp.where(masked, prob, -1.0)  # [B, T]
    best = jnp.arange(score.shape[-1]) == jnp.argmax(score, axis=-1)[:, None]
    some = jnp.any(chosen, axis=-1, keepdims=True)  # [B, 1]
    return masked & jnp.where(some, chosen, best)
