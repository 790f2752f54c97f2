"""Dream: the whole canvas at once, over a fixed number of steps.

The sampler published with Dream (`generation_utils.py`). Its times are t = linspace(1, eps,
steps + 1); a step from t to s writes a share 1 - s/t of what is masked, the last step the rest.
In closed form the share of step j is (1 - eps) / (steps - (1 - eps) j), which has no rounding
errors of a grid: with eps = 0 and n positions in n steps it is one position a step.

A share may be less than a position; then nothing is written, as published.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm import algorithms
from jdllm.decoding.canvas import interface as canvas_lib
from jdllm.decoding.canvas import rules as canvas_rules

ORIGIN = algorithms.word("Dream", "alg", "origin")
TOPK_MARGIN = algorithms.word("Dream", "alg", "topk_margin")
ENTROPY = algorithms.word("Dream", "alg", "entropy")
SALT = 2  # of `canvas.uniform`, one per algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class Dream:
    """`extra`: [R] int32, how many positions there were to write."""

    tempers = True
    guides = False

    def begin(self, canvas: canvas_lib.Canvas) -> jax.Array:
        return jnp.sum(canvas.masked, axis=1, dtype=jnp.int32)

    def plan(self, canvas: canvas_lib.Canvas) -> tuple[canvas_lib.Canvas, canvas_lib.Window]:
        return canvas_rules.full_window(canvas, wanted=canvas.masked)

    def update(
        self, canvas: canvas_lib.Canvas, proposal: canvas_lib.CanvasProposal
    ) -> canvas_lib.Canvas:
        """Writes the step's share: `origin` each position by chance, the others the best ones."""
        params = canvas.params
        steps = jnp.where(params.steps > 0, params.steps, canvas.extra)
        is_last = canvas.step >= steps - 1
        # Of the last step, and of rows of other algorithms, the denominator may be 0.
        left = jnp.where(is_last, 1.0, steps - (1 - params.eps) * canvas.step)
        masks = jnp.sum(canvas.masked, axis=1, dtype=jnp.int32)
        count = jnp.where(
            is_last, masks, jnp.floor(masks * (1 - params.eps) / left).astype(jnp.int32)
        )
        chance = jnp.where(is_last, 1.0, (1 - params.eps) / left)
        drawn = canvas_lib.uniform(canvas, SALT)
        score = _score(params, proposal, drawn)
        best = canvas_lib.ranks(score, canvas.masked) < count[:, None]
        is_origin = (params.alg == ORIGIN)[:, None]
        return canvas.write(
            proposal.tokens, where=jnp.where(is_origin, drawn < chance[:, None], best)
        )


def _score(
    params: canvas_lib.CanvasParams, proposal: canvas_lib.CanvasProposal, drawn: jax.Array
) -> jax.Array:
    """Returns [R, S]: the highest are written.

    With Gumbel noise they are draws without replacement from softmax(confidence / alg_temp).
    """
    alg, temperature = params.alg[:, None], params.alg_temp[:, None]
    confidence = jnp.where(
        alg == TOPK_MARGIN,
        proposal.margin,
        jnp.where(alg == ENTROPY, -proposal.entropy, proposal.prob),
    )
    noisy = confidence / jnp.where(temperature > 0, temperature, 1.0) - jnp.log(-jnp.log(drawn))
    return jnp.where(temperature > 0, noisy, confidence)
