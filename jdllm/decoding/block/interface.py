"""The array interface between step functions and decoding algorithms.

An algorithm is a pure `update` of a `BlockState` from a `Proposal`; it sees no
page, no request and no other row's logits. Structure (which rule) lives in the
frozen dataclass that implements `Algorithm`, hence in the compiled step; every
option a request may set is a `[B]` array in `BlockParams`, hence never a compile.

Letters: B rows, T block length (one position per token).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

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
    """Per-row options, [B] each: those of all block algorithms; a rule reads what it has."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """The block that each row denoises; every leaf leads with B.

    masked: not written yet. editable: may change at all (False on the prompt's tail
    and on padding). done: the forward just run wrote K,V of the final tokens.
    extra: the algorithm's own state, zeros at the start of a block.
    """

    tokens: jax.Array  # [B, T] int32
    masked: jax.Array  # [B, T] bool
    editable: jax.Array  # [B, T] bool
    done: jax.Array  # [B] bool
    params: BlockParams
    extra: Any

    def write(self, tokens: jax.Array, *, where: jax.Array) -> BlockState:
        """Writes `tokens` at editable positions of unfinished rows; written is unmasked."""
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

    The others hold their own token at probability 0, and log-probabilities without a meaning.
    `tokens`/`prob`: the token to write into a masked position (drawn where the row
    samples) and the confidence that gates it. `best`/`best_prob`: the argmax and its
    probability, for edits. `is_drawn`: the row samples. The mask id is never
    proposed. `logprob` and `best_logprob` are the log-probabilities of `tokens` and `best` at
    temperature 1, under the logits that were chosen from (penalty included).
    """

    tokens: jax.Array  # [B, T] int32
    prob: jax.Array  # [B, T] float32
    best: jax.Array  # [B, T] int32
    best_prob: jax.Array  # [B, T] float32
    is_drawn: jax.Array  # [B] bool
    logprob: jax.Array  # [B, T] float32
    best_logprob: jax.Array  # [B, T] float32


class Algorithm(Protocol):
    """Implemented by frozen dataclasses: hashable, so static under jit.

    `persists_apart`: after a block is final, one more forward writes its K,V.
    """

    persists_apart: bool

    def init_extra(self, num_rows: int, block_size: int) -> Any:
        """Returns the zeroed `extra` of `num_rows` fresh blocks."""
        ...

    def update(self, block: BlockState, proposal: Proposal) -> BlockState:
        """Returns the block after one step; rows that are done stay as they are."""
        ...

    def is_final(self, block: BlockState) -> jax.Array:
        """Returns [B] bool: the row's tokens will not change any more."""
        ...

    def settled(self, block: BlockState) -> jax.Array:
        """Returns [B, T] bool: the token of the position will not change any more."""
        ...


def select_masked(masked: jax.Array, prob: jax.Array, threshold: jax.Array) -> jax.Array:
    """Returns [B, T]: masked positions whose `prob` exceeds the row's threshold, at least one.

    Without any confident position the most probable masked one is taken, the lowest
    position on a tie; rows without a masked position select nothing.
    """
    score = jnp.where(masked, prob, -1.0)  # [B, T]
    confident = masked & (score > threshold[:, None])
    best = jnp.arange(score.shape[-1]) == jnp.argmax(score, axis=-1)[:, None]
    some = jnp.any(confident, axis=-1, keepdims=True)  # [B, 1]
    return masked & jnp.where(some, confident, best)
