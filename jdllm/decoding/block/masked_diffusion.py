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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm import algorithms
from jdllm.decoding import order
from jdllm.decoding.block import interface

_POLICY = "selection_policy"
THRESHOLD = algorithms.word("MaskedDiffusion", _POLICY, "confidence_threshold")
LEFTMOST = algorithms.word("MaskedDiffusion", _POLICY, "leftmost")


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """Only fills masks; a block of B positions needs at most B updates."""

    persists_apart = True

    def init_extra(self, num_rows: int, block_size: int) -> jax.Array:
        """Returns the number of the next step of each row."""
        del block_size
        return jnp.zeros((num_rows,), jnp.int32)

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes the step's positions; a row without masks at entry is done."""
        B = block.masked.shape[1]
        had_masked = jnp.any(block.masked, axis=-1)
        policy = block.params.selection_policy[:, None]
        given = block.params.max_denoising_steps
        steps = jnp.where(given > 0, jnp.minimum(given, B), B)
        left = jnp.maximum(steps - block.extra, 1)[:, None]  # this step and those after it
        masks = jnp.sum(block.masked, axis=1, dtype=jnp.int32, keepdims=True)
        count = (masks + left - 1) // left
        place = jnp.arange(B, dtype=jnp.int32)
        in_order = jnp.broadcast_to(-place.astype(jnp.float32), block.masked.shape)
        prob = jnp.exp(proposal.logprob)
        rank = order.ranks(jnp.where(policy == LEFTMOST, in_order, prob), block.masked)
        confident = (prob >= block.params.threshold[:, None]) | (rank == 0) | (left == 1)
        chosen = jnp.where(policy == THRESHOLD, confident, rank < count)
        written = block.write(proposal.tokens, where=chosen & block.masked)
        return dataclasses.replace(
            written,
            done=block.done | ~had_masked,
            extra=block.extra + (had_masked & ~block.done),
        )

    def is_final(self, block: interface.BlockState) -> Bool[Array, " R"]:
        return ~jnp.any(block.masked, axis=-1)

    def settled(self, block: interface.BlockState) -> Bool[Array, "R B"]:
        return ~block.masked
