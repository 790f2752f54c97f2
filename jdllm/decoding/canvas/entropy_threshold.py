"""EntropyThreshold: block after block, write the positions of low entropy.

This is the rule of SGLang's pull request for d3LLM (`entropy_threshold.py`), within the blocks of
d3LLM's own `generate`, which does not decode several blocks at once. Every step forwards the whole
canvas.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool

from jdllm.decoding.canvas import fill
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal


@dataclasses.dataclass(frozen=True, slots=True)
class EntropyThreshold(fill.CanvasRule):
    """Writes the positions below the threshold, or else the one of the lowest entropy."""

    def choose(self, canvas: Canvas, proposal: CanvasProposal) -> Bool[Array, "R S"]:
        return proposal.entropy < canvas.params.threshold[:, None]
