"""SDAR: the rules of SDAR's own `generate`, also those of JetEngine and of TraDo.

A block of B positions has S denoising steps; step t (from 0) writes n = B // S positions, and one
more if t < B % S. `remasking_strategy` says which of the masked ones:

- `low_confidence_dynamic`: all whose confidence exceeds `threshold`, or if these are fewer than n
  the n most confident ones;
- `low_confidence_static`: the n most confident ones;
- `sequential`: the first n;
- `entropy_bounded`: in the order of rising entropy, as many as have a sum of entropies (nats) of at
  most `eb_threshold`, and at least one. It has no number of steps.

The confidence is the probability of the token in the distribution that it was drawn from, after
temperature, top_k and top_p; for greedy rows that of the best token. If fewer than n positions are
masked (the prompt has a part of the block), all of them are written, and no other: the published
code then also overwrites positions that are not masked.

Letters: R rows, B positions of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.algorithms import lookup
from jdllm.decoding import order
from jdllm.decoding.block import fill, interface

_STRATEGY = "remasking_strategy"
DYNAMIC = lookup.word("SDAR", _STRATEGY, "low_confidence_dynamic")
SEQUENTIAL = lookup.word("SDAR", _STRATEGY, "sequential")
ENTROPY_BOUNDED = lookup.word("SDAR", _STRATEGY, "entropy_bounded")


@dataclasses.dataclass(frozen=True, slots=True)
class SDAR(fill.CountedRule):
    """Writes the positions that the row's strategy names."""

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "R B"]:
        strategy = block.params.remasking_strategy[:, None]
        count = self._count(block)
        score = jnp.where(
            strategy == ENTROPY_BOUNDED,
            -proposal.entropy,
            jnp.where(strategy == SEQUENTIAL, fill.leftmost(block.masked), proposal.draw_prob),
        )
        rank = order.ranks(score, block.masked)
        confident = block.masked & (proposal.draw_prob > block.params.threshold[:, None])
        enough = jnp.sum(confident, axis=1, keepdims=True) >= count
        chosen = jnp.where((strategy == DYNAMIC) & enough, confident, rank < count)
        bounded = _sum_up_to(proposal.entropy, rank) <= block.params.eb_threshold[:, None]
        return jnp.where(strategy == ENTROPY_BOUNDED, bounded | (rank == 0), chosen)

    def _count(self, block: interface.BlockState) -> Int[Array, "R 1"]:
        """Returns n; it is 0 in no step, since the steps of a block write B positions in all."""
        B = block.masked.shape[1]
        steps = fill.steps_of(block.params.denoising_steps, B)
        return (B // steps + (block.extra < B % steps))[:, None]


def _sum_up_to(value: Float[Array, "R B"], rank: Int[Array, "R B"]) -> Float[Array, "R B"]:
    """Returns the sum of the values of all ranks up to a position's own."""
    counts = rank[:, None, :] <= rank[:, :, None]
    ranked = rank[:, None, :] < value.shape[1]  # others have no rank
    return jnp.sum(jnp.where(counts & ranked, value[:, None, :], 0.0), axis=2)
