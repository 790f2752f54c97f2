"""LLaDA: as many tokens a step as the schedule says, the surest first, block after block.

The sampler published with LLaDA (`generate.py`): a block's positions are spread evenly over its
share of the steps. Every forward is a full one. Classifier-free guidance (`cfg_scale`) is in the
logits before the algorithm sees their statistics.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm import algorithms
from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules

RANDOM = algorithms.word("LLaDA", "remasking", "random")
SALT = 1  # of `canvas.uniform`, one per algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class LLaDA:
    """`extra`: [R, S] bool, what was masked before the first forward."""

    tempers = False
    guides = True

    def begin(self, canvas: canvas_lib.Canvas) -> jax.Array:
        return canvas.masked

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        return canvas_rules.full_window(canvas, wanted=canvas_lib.current_block(canvas))

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes the step's share of the first block that has masked positions, at least one."""
        is_random = (canvas.params.remasking == RANDOM)[:, None]
        score = jnp.where(is_random, canvas_lib.uniform(canvas, SALT), proposal.prob)
        eligible = canvas_lib.current_block(canvas) & canvas.masked
        count = canvas_rules.scheduled(canvas, canvas.extra)[:, None]
        return canvas.write(proposal.tokens, where=canvas_lib.ranks(score, eligible) < count)
