"""Gemma4Renoise: keep drawn tokens while their entropies sum to little, and renoise the others.

This is the rule of DiffusionGemma (transformers 5.23 and SGLang 0.5.23, `gemma4_renoise.py`). Step
by step the temperature falls from `t_max` towards `t_min`. A step draws a token for each position
from the tempered distribution. Positions are taken in the order of their entropies, as long as the
entropies before them sum to at most `entropy_bound`, so at least one is taken; the others get
random tokens. The canvas is done when its most probable tokens have been the same as in
`stability_threshold` steps before and the mean entropy is below `confidence_threshold`, or after
`max_denoising_steps`.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jdllm.decoding.uniform import interface


@dataclasses.dataclass(frozen=True, slots=True)
class Gemma4Renoise:
    """The rule, without structure of its own."""

    def temperature(
        self, step: Int32[Array, " R"], params: interface.UniformParams
    ) -> Float32[Array, " R"]:
        """Returns `t_max` in the first step; the last one is a step's share above `t_min`."""
        most = jnp.maximum(params.max_denoising_steps, 1)  # padding rows have 0
        remaining = (most - step).astype(jnp.float32) / most.astype(jnp.float32)
        return params.t_min + (params.t_max - params.t_min) * remaining

    def denoise(
        self,
        canvas: interface.NoisyCanvas,
        seen: interface.Seen,
        params: interface.UniformParams,
    ) -> tuple[interface.NoisyCanvas, Bool[Array, " R"]]:
        """Returns the canvas after a step, and whether `best` is the row's output."""
        accepted = sum_before(seen.entropy) <= params.entropy_bound[:, None]
        is_same = jnp.all(seen.best == canvas.best, axis=1)
        same_steps = jnp.where(is_same, canvas.same_steps + 1, 0)
        is_sure = jnp.mean(seen.entropy, axis=1) < params.confidence_threshold
        is_last = canvas.step + 1 >= params.max_denoising_steps
        after = interface.NoisyCanvas(
            tokens=jnp.where(accepted, seen.drawn, seen.noise),
            best=seen.best,
            same_steps=same_steps,
            step=canvas.step + 1,
        )
        return after, ((same_steps >= params.stability_threshold) & is_sure) | is_last


def sum_before(entropy: Float32[Array, "R L"]) -> Float32[Array, "R L"]:
    """Returns for each position the sum of the entropies that come before its own in order.

    Of equal ones the lower position comes first. All pairs are compared, since a sort cannot run
    within a loop on the device.
    """
    place = jnp.arange(entropy.shape[1])
    mine, other = entropy[:, :, None], entropy[:, None, :]
    is_before = (other < mine) | ((other == mine) & (place[None, :] < place[:, None]))
    return jnp.sum(jnp.where(is_before, other, 0.0), axis=2)
