"""What rules have in common that write one block after the other with forwards of the whole canvas.

A rule of this shape is one method, `choose`: which masked positions of the current block a step
writes. At least one is written in every step.
"""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules


class CanvasRule(abc.ABC):
    """The base of such rules for models that see their whole canvas."""

    tempers = False
    guides = False

    @abc.abstractmethod
    def choose(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> Bool[Array, "R S"]:
        """Returns the positions to write; only masked ones of the current block count.

        In a row where none is left, the one of the lowest entropy is written. `canvas.params` has
        the row's options; `proposal` what the model suggests.
        """

    def begin(self, canvas: canvas_lib.Canvas) -> tuple[()]:
        """Returns nothing: such a rule has no state of its own."""
        del canvas
        return ()

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        """Returns a forward of everything, with proposals for the current block."""
        return canvas_rules.full_window(canvas, wanted=canvas_lib.current_block(canvas))

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes the chosen positions, or else the one of the lowest entropy."""
        eligible = canvas_lib.current_block(canvas) & canvas.masked
        chosen = eligible & self.choose(canvas, proposal)
        none = ~jnp.any(chosen, axis=1, keepdims=True)
        best = canvas_rules.lowest(proposal.entropy, eligible)
        return canvas.write(proposal.tokens, where=chosen | (none & best))
