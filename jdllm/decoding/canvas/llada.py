"""LLaDA: a schedule says how many tokens a step writes, the most probable first, block by block.

This is the sampler published with LLaDA (`generate.py`). It spreads the positions of a block
evenly over the block's share of the steps. Every step forwards the whole canvas. The logits
already contain classifier-free guidance (`cfg_scale`) when the algorithm sees their statistics.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.algorithms import lookup
from jdllm.decoding import order
from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules

RANDOM = lookup.word("LLaDA", "remasking", "random")
SALT = 1  # of `interface.uniform`, one per algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class LLaDA:
    """The rule; `extra` holds the positions that were masked before the first forward."""

    tempers = False
    guides = True

    def begin(self, canvas: canvas_lib.Canvas) -> Bool[Array, "R S"]:
        return canvas.masked

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        return canvas_rules.full_window(canvas, wanted=canvas_lib.current_block(canvas))

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes the step's share of the first block with masked positions, at least one."""
        is_random = (canvas.params.remasking == RANDOM)[:, None]
        score = jnp.where(is_random, canvas_lib.uniform(canvas, SALT), proposal.prob)
        eligible = canvas_lib.current_block(canvas) & canvas.masked
        count = canvas_rules.scheduled(canvas, canvas.extra)[:, None]
        return canvas.write(proposal.tokens, where=order.ranks(score, eligible) < count)
