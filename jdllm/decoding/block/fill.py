"""What rules have in common that fill masks and never change a written token.

A rule of this shape is one method, `choose`: which masked positions a step writes. At least one is
written in every step, so a block of T positions needs at most T steps. After the last one, one more
forward persists the block's K,V.
"""

from __future__ import annotations

import abc
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.block import interface


class BlockRule(abc.ABC):
    """The base of such rules for models that write block after block."""

    persists_apart = True

    @abc.abstractmethod
    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "B T"]:
        """Returns the positions to write; those that are not masked do not count.

        In a row where none is left, the most probable masked position is written. `block.params`
        has the row's options; `proposal` what the model suggests.
        """

    def init_extra(self, num_rows: int, block_size: int) -> tuple[()]:
        """Returns nothing: such a rule has no state of its own."""
        del num_rows, block_size
        return ()

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes the chosen positions, or else the most probable one.

        A row without masks at entry is done: its forward persisted K,V.
        """
        had_masked = jnp.any(block.masked, axis=-1)
        chosen = self.choose(block, proposal)
        where = interface.at_least_one(block.masked, proposal.prob, chosen)
        written = block.write(proposal.tokens, where=where)
        return dataclasses.replace(written, done=block.done | ~had_masked)

    def is_final(self, block: interface.BlockState) -> Bool[Array, " B"]:
        """Returns whether no position is masked."""
        return ~jnp.any(block.masked, axis=-1)

    def settled(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        """Returns which positions are written."""
        return ~block.masked
