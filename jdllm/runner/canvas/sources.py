"""What the statistics of positions are computed from: hidden states, and what draws depend on.

Letters: R rows, T packed tokens, C positions.
"""

from __future__ import annotations

import dataclasses
from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jdllm.runner.canvas.packing import Packing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The hidden states from which positions are predicted, and the factor that scales them.

    `edge` is [R, 0] unless logits are shifted; `scale` is None where no algorithm tempers.
    """

    hidden: Float[Array, "T D"]
    edge: Float[Array, "R D"]
    packing: Packing
    low: Int32[Array, " R"]
    scale: Float32[Array, " R"] | None

    def of(self, row: Int32[Array, " C"], position: Int32[Array, " C"]) -> Float[Array, "C D"]:
        """Returns the scaled states that predict `position` of `row`."""
        is_shifted = self.edge.shape[1] > 0
        offset = position - is_shifted - self.low[row]
        token = jnp.clip(self.packing.cu_q_lens[row] + offset, 0, self.hidden.shape[0] - 1)
        x = self.hidden[token]
        if is_shifted:
            x = jnp.where(offset[:, None] < 0, self.edge[row].astype(x.dtype), x)
        if self.scale is None:
            return x
        return (x.astype(jnp.float32) * self.scale[row, None]).astype(x.dtype)


class DrawOptions(TypedDict, total=False):
    """The arguments of `unembed_stats` that make it draw."""

    draw_keys: UInt32[Array, "C 2"]
    temperature: Float32[Array, " C"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What a draw depends on, besides its position."""

    temperature: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]
    step: Int32[Array, " R"]

    def options(self, row: Int32[Array, " C"], position: Int32[Array, " C"]) -> DrawOptions:
        """Returns the temperature of each position, and its key from seed, position and step."""

        def key(
            seed: UInt32[Array, " 2"], position: Int32[Array, ""], step: Int32[Array, ""]
        ) -> UInt32[Array, " 2"]:
            of_position = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
            return jax.random.key_data(jax.random.fold_in(of_position, step))

        keys = jax.vmap(key)(self.seed[row], position, self.step[row])
        return {"draw_keys": keys, "temperature": self.temperature[row]}
