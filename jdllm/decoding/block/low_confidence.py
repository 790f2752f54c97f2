"""LowConfidence: write the positions that the model is sure of, at least one per step.

This is the rule of LLaDA2.0 and SDAR (SGLang 0.5.23, `dllm/algorithm/low_confidence.py`).
After the last position is written, one more forward persists the block's K,V.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.block import interface


@dataclasses.dataclass(frozen=True, slots=True)
class LowConfidence:
    """Only fills masks; a block of T positions needs at most T updates."""

    persists_apart = True

    def init_extra(self, num_rows: int, block_size: int) -> tuple[()]:
        del num_rows, block_size
        return ()

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes every masked position above the threshold, or else the most probable one.

        A row without masks at entry is done: its forward persisted K,V.
        """
        had_masked = jnp.any(block.masked, axis=-1)
        where = interface.select_masked(block.masked, proposal.prob, block.params.threshold)
        written = block.write(proposal.tokens, where=where)
        return dataclasses.replace(written, done=block.done | ~had_masked)

    def is_final(self, block: interface.BlockState) -> Bool[Array, " B"]:
        return ~jnp.any(block.masked, axis=-1)

    def settled(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        return ~block.masked
