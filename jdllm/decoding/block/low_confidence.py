"""LowConfidence: write the positions that the model is sure of, at least one per step.

This is the rule of LLaDA2.0 and SDAR (SGLang 0.5.23, `dllm/algorithm/low_confidence.py`).
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool

from jdllm.decoding.block import fill, interface


@dataclasses.dataclass(frozen=True, slots=True)
class LowConfidence(fill.BlockRule):
    """Writes every masked position above the threshold, or else the most probable one."""

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "B T"]:
        return proposal.prob > block.params.threshold[:, None]
