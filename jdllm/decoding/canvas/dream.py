"""Dream: the whole canvas at once, over a fixed number of steps.

This is the sampler published with Dream (`generation_utils.py`). Its times are t = linspace(1,
eps, steps + 1). A step from t to s writes a share 1 - s/t of the masked positions; the last step
writes the rest. In closed form the share of step j is (1 - eps) / (steps - (1 - eps) j). This form
has no rounding errors of a grid: with eps = 0 and n positions in n steps, each step writes one
position.

A share may be less than one position. Then the step writes nothing, as the published sampler does.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jdllm.algorithms import lookup
from jdllm.decoding import order
from jdllm.decoding.canvas import interface, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasParams, CanvasProposal, Window

ORIGIN = lookup.word("Dream", "alg", "origin")
TOPK_MARGIN = lookup.word("Dream", "alg", "topk_margin")
ENTROPY = lookup.word("Dream", "alg", "entropy")
SALT = 2  # of `interface.uniform`, one per algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class Dream:
    """The rule; `extra` holds how many positions were masked before the first forward."""

    tempers = True
    guides = False

    def begin(self, canvas: Canvas) -> Int32[Array, " R"]:
        return jnp.sum(canvas.masked, axis=1, dtype=jnp.int32)

    def plan(self, canvas: Canvas) -> tuple[Canvas, Window]:
        return rules.full_window(canvas, wanted=canvas.masked)

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        """Writes the step's share: with `origin` by chance, otherwise the best positions."""
        params = canvas.params
        steps = jnp.where(params.steps > 0, params.steps, canvas.extra)
        is_last = canvas.step >= steps - 1
        # The denominator may be 0 in the last step and in rows of other algorithms.
        left = jnp.where(is_last, 1.0, steps - (1 - params.eps) * canvas.step)
        masks = jnp.sum(canvas.masked, axis=1, dtype=jnp.int32)
        count = jnp.where(
            is_last, masks, jnp.floor(masks * (1 - params.eps) / left).astype(jnp.int32)
        )
        chance = jnp.where(is_last, 1.0, (1 - params.eps) / left)
        drawn = interface.uniform(canvas, SALT)
        score = _score(params, proposal, drawn)
        best = order.ranks(score, canvas.masked) < count[:, None]
        is_origin = (params.alg == ORIGIN)[:, None]
        return canvas.write(
            proposal.tokens, where=jnp.where(is_origin, drawn < chance[:, None], best)
        )


def _score(
    params: CanvasParams,
    proposal: CanvasProposal,
    drawn: Float[Array, "R S"],
) -> Float[Array, "R S"]:
    """Returns the scores; a step writes the positions with the highest ones.

    With Gumbel noise, these are draws without replacement from softmax(confidence / alg_temp).
    """
    alg, temperature = params.alg[:, None], params.alg_temp[:, None]
    confidence = jnp.where(
        alg == TOPK_MARGIN,
        proposal.margin,
        jnp.where(alg == ENTROPY, -proposal.entropy, proposal.prob),
    )
    # Not less than this, so that the quotients stay finite and different.
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, 1e-6), 1.0)
    noisy = confidence / divisor - jnp.log(-jnp.log(drawn))
    return jnp.where(temperature > 0, noisy, confidence)
