"""MaskedDiffusion: the rules of Stable-DiffCoder's `generate_block` and of vLLM's masked diffusion.

A block has at most S denoising steps. `selection_policy` says which masked positions step t (from
0) writes:

- `confidence_threshold`: all whose probability is at least `threshold`, and the most probable one;
- `low_confidence`: the k most probable ones, k = ceil(masked / (S - t)). This is LLaDA's schedule:
  the block's masks are shared evenly by the steps, and the first steps take the remainder;
- `leftmost`: the first k.

The last step writes all that are left. The probability is that of the token, best or drawn, at
temperature 1.

Letters: R rows, B positions of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.algorithms import lookup
from jdllm.decoding import order
from jdllm.decoding.block import fill, interface

_POLICY = "selection_policy"
THRESHOLD = lookup.word("MaskedDiffusion", _POLICY, "confidence_threshold")
LEFTMOST = lookup.word("MaskedDiffusion", _POLICY, "leftmost")


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedDiffusion(fill.CountedRule):
    """Writes the positions that the row's policy names."""

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "R B"]:
        policy = block.params.selection_policy[:, None]
        steps = fill.steps_of(block.params.max_denoising_steps, block.masked.shape[1])
        left = jnp.maximum(steps - block.extra, 1)[:, None]  # this step and those after it
        masks = jnp.sum(block.masked, axis=1, dtype=jnp.int32, keepdims=True)
        count = (masks + left - 1) // left
        prob = jnp.exp(proposal.logprob)
        score = jnp.where(policy == LEFTMOST, fill.leftmost(block.masked), prob)
        rank = order.ranks(score, block.masked)
        confident = (prob >= block.params.threshold[:, None]) | (rank == 0) | (left == 1)
        return jnp.where(policy == THRESHOLD, confident, rank < count)
