"""EntropyThreshold: block after block, write what the model is sure of, by its entropy.

The rule of SGLang's pull request for d3LLM (`entropy_threshold.py`) within the blocks of d3LLM's
own `generate`, which has no multi-block look-ahead. Every forward is a full one.
"""

from __future__ import annotations

import dataclasses

import jax

from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules


@dataclasses.dataclass(frozen=True, slots=True)
class EntropyThreshold:
    """The position of lowest entropy always, others below the threshold."""

    tempers = False
    guides = False

    def begin(self, canvas: canvas_lib.Canvas) -> tuple[()]:
        del canvas
        return ()

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        return canvas_rules.full_window(canvas, wanted=canvas_lib.current_block(canvas))

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes at least one position of the first block that has masked ones."""
        eligible: jax.Array = canvas_lib.current_block(canvas) & canvas.masked
        sure = proposal.entropy < canvas.params.threshold[:, None]
        best = canvas_rules.lowest(proposal.entropy, eligible)
        return canvas.write(proposal.tokens, where=(eligible & sure) | best)
