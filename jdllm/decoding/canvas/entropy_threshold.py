"""EntropyThreshold: block after block, write the positions of low entropy.

This is the rule of SGLang's pull request for d3LLM (`entropy_threshold.py`), within the blocks of
d3LLM's own `generate`, which does not decode several blocks at once. Every step forwards the whole
canvas.
"""

from __future__ import annotations

import dataclasses

from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules


@dataclasses.dataclass(frozen=True, slots=True)
class EntropyThreshold:
    """Writes the position of the lowest entropy, and all others below the threshold."""

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
        """Writes at least one position of the first block with masked positions."""
        eligible = canvas_lib.current_block(canvas) & canvas.masked
        sure = proposal.entropy < canvas.params.threshold[:, None]
        best = canvas_rules.lowest(proposal.entropy, eligible)
        return canvas.write(proposal.tokens, where=(eligible & sure) | best)
