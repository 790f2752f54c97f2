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
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jdllm import algorithms

# One field per option. Its type is Any, since a type checker cannot know the fields.
_Options: Any = dataclasses.make_dataclass(
    "BlockOptions",
    [(name, jax.Array) for name in algorithms.arrays_of(algorithms.BLOCK)],
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
