"""HierarchyBlock: a block's sub-blocks one after the other, each by confidence.

This is the rule of Fast-dLLM v2's `generate` (NVlabs/Fast-dLLM; in SGLang's pull request 22156 it
has this name). A block is cut into sub-blocks of `small_block_size` positions, the last one shorter
if the sizes do not divide. A step writes in the first sub-block that has masks: all positions whose
confidence exceeds `threshold`, or else the most confident one.

With `use_block_cache` a step forwards that sub-block alone, once its first position is written.
It sees K,V of the rest of the block as the block's last whole forward computed them, so the cache
may change tokens. K,V of a finished block are computed anew, and are exact.

The confidence is the probability of the token in the distribution that it was drawn from, after
temperature, top_k and top_p; for greedy rows that of the best token.

Letters: R rows, B positions of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.block import fill, interface


@dataclasses.dataclass(frozen=True, slots=True)
class HierarchyBlock(fill.BlockRule):
    """Writes confident positions of the first sub-block that is not finished."""

    forwards_parts = True

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "R B"]:
        return interface.select_masked(
            self.reads(block), proposal.draw_prob, block.params.threshold
        )

    def reads(self, block: interface.BlockState) -> Bool[Array, "R B"]:
        """Returns the masked positions of the present sub-block."""
        return block.masked & _present(block)

    def forwards(self, block: interface.BlockState) -> Bool[Array, "R B"]:
        """Returns the present sub-block with the cache, and all positions without it.

        Until a sub-block's first position is written, its steps forward the whole block.
        """
        place = jnp.arange(block.masked.shape[1], dtype=jnp.int32)
        begins = place % block.params.small_block_size[:, None] == 0
        is_open = jnp.any(self.reads(block) & begins, axis=1)
        is_whole = ~block.params.use_block_cache | is_open
        return is_whole[:, None] | _present(block)


def _present(block: interface.BlockState) -> Bool[Array, "R B"]:
    """Returns the positions, written or not, of the first sub-block that has masks."""
    place = jnp.arange(block.masked.shape[1], dtype=jnp.int32)
    part = place // block.params.small_block_size[:, None]
    first = jnp.argmax(block.masked, axis=1)
    return part == jnp.take_along_axis(part, first[:, None], axis=1)
