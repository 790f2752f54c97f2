"""What rules have in common that fill masks and never change a written token.

A rule of this shape is one method, `choose`: which masked positions a step writes. At least one is
written in every step, so a block of T positions needs at most T steps. After the last one, one more
forward persists the block's K,V.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jdllm.decoding.block import interface


class BlockRule(abc.ABC):
    """The base of such rules for models that write block after block."""

    persists_apart = True
    forwards_parts = False

    @abc.abstractmethod
    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "B T"]:
        """Returns the positions to write; those that are not masked do not count.

        In a row where none is left, the most probable masked position is written. `block.params`
        has the row's options; `proposal` what the model suggests.
        """

    def init_extra(self, num_rows: int, block_size: int) -> Any:
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

    def reads(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        """Returns which positions are not written."""
        return block.masked

    def forwards(self, block: interface.BlockState) -> Bool[Array, "B T"]:
        """Returns all positions."""
        return jnp.ones_like(block.masked)


class CountedRule(BlockRule):
    """The base of such rules that give a block a number of steps; `block.extra` is the step's."""

    def init_extra(self, num_rows: int, block_size: int) -> jax.Array:
        """Returns the number of the next step of each row."""
        del block_size
        return jnp.zeros((num_rows,), jnp.int32)

    def update(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> interface.BlockState:
        """Writes what `BlockRule` writes, and counts the step of rows that had masks at entry."""
        counts = jnp.any(block.masked, axis=-1) & ~block.done
        return dataclasses.replace(super().update(block, proposal), extra=block.extra + counts)


def steps_of(given: Int32[Array, " B"], block_size: int) -> Int32[Array, " B"]:
    """Returns how many steps a block has: `given`, at most one a position; 0 means that many."""
    return jnp.where(given > 0, jnp.minimum(given, block_size), block_size)


def leftmost(masked: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Returns scores that rank positions from left to right."""
    place = jnp.arange(masked.shape[1], dtype=jnp.float32)
    return jnp.broadcast_to(-place, masked.shape)
