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
from jdllm.decoding.canvas import interface, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal, Window

RANDOM = lookup.word("LLaDA", "remasking", "random")
SALT = 1  # of `interface.uniform`, one per algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class LLaDA:
    """The rule; `extra` holds the positions that were masked before the first forward."""

    tempers = False
    guides = True

    def begin(self, canvas: Canvas) -> Bool[Array, "R S"]:
        return canvas.masked

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        return rules.full_window(canvas, wanted=interface.current_block(canvas))

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Writes the step's share of the first block with masked positions, at least one."""
        is_random = (canvas.params.remasking == RANDOM)[:, None]
        score = jnp.where(is_random, interface.uniform(canvas, SALT), proposal.prob)
        eligible = interface.current_block(canvas) & canvas.masked
        count = rules.scheduled(canvas, canvas.extra)[:, None]
        return canvas.write(proposal.tokens, where=order.ranks(score, eligible) < count)
