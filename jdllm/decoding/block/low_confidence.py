"""LowConfidence: write what the model is sure of, at least one position a step.

The rule of LLaDA2.0 and SDAR (SGLang 0.5.23, `dllm/algorithm/low_confidence.py`).
After the last position is written one more forward persists the block's K,V.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm.decoding.block import interface


@dataclasses.dataclass(frozen=True, slots=True)
class LowConfidence:
    """Mask-to-token only; a block of T positions needs at most T updates."""

    persists_apart = True

    def init_extra(self, num_rows: int, block_size: int) -> tuple[()]:
        del num_rows, block_size
        return ()

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes every masked position above the threshold, else the most probable one.

        A row that had nothing masked at entry is done: its forward persisted K,V.
        """
        had_masked = jnp.any(block.masked, axis=-1)
        where = interface.select_masked(block.masked, proposal.prob, block.params.threshold)
        written = block.write(proposal.tokens, where=where)
        return dataclasses.replace(written, done=block.done | ~had_masked)

    def is_final(self, block: interface.BlockState) -> jax.Array:
        return ~jnp.any(block.masked, axis=-1)

    def settled(self, block: interface.BlockState) -> jax.Array:
        return ~block.masked
