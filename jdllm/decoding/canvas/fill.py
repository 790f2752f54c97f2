"""What rules have in common that write one block after the other with forwards of the whole canvas.

A rule of this shape is one method, `choose`: which masked positions of the current block a step
writes. At least one is written in every step.
"""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.canvas import interface, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal, Window


class CanvasRule(abc.ABC):
    """The base of such rules for models that see their whole canvas."""

    tempers = False
    guides = False

    @abc.abstractmethod
    def choose(self, canvas: Canvas, proposal: CanvasProposal) -> Bool[Array, "R S"]:
        """Returns the positions to write; only masked ones of the current block count.

        In a row where none is left, the one of the lowest entropy is written. `canvas.params` has
        the row's options; `proposal` what the model suggests.
        """

    def begin(self, canvas: Canvas) -> tuple[()]:
        """Returns nothing: such a rule has no state of its own."""
        del canvas
        return ()

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        """Returns a forward of everything, with proposals for the current block."""
        return rules.full_window(canvas, wanted=interface.current_block(canvas))

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Writes the chosen positions, or else the one of the lowest entropy."""
        eligible = interface.current_block(canvas) & canvas.masked
        chosen = eligible & self.choose(canvas, proposal)
        none = ~jnp.any(chosen, axis=1, keepdims=True)
        best = rules.lowest(proposal.entropy, eligible)
        return canvas.write(proposal.tokens, where=chosen | (none & best))
