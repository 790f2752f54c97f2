"""Angles of rotary positions; `pallas_kernels.apply_rope` rotates by them.

Letters: those of the whole project, and A angles, half of the rotated dims of a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

CosSin = tuple[Float32[Array, "T A"], Float32[Array, "T A"]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): frequencies for contexts `factor` times the `original_length`.

    Pairs of dims that turn more than `beta_fast` times in the original length keep their frequency;
    that of pairs that turn less than `beta_slow` times is divided by `factor`; a ramp lies between.
    cos and sin are multiplied by m(mscale) / m(mscale_all_dim), m(x) = 0.1 x ln(factor) + 1, or 1
    for a factor of at most 1 (DeepSeek-V2's form, as in transformers' `modeling_rope_utils.py`).
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def frequencies(self, rotary_dim: int, theta: float) -> Float32[np.ndarray, " A"]:
        """Returns the frequency of each pair of dims."""

        def dim_that_turns(times: float) -> float:
            length = self.original_length / (2 * math.pi * times)
            return rotary_dim * math.log(length) / (2 * math.log(theta))

        low = max(math.floor(dim_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(dim_that_turns(self.beta_slow)), rotary_dim - 1)
        pair = np.arange(rotary_dim // 2)
        # Of equal ends, the reference makes a ramp that is all but a step.
        ramp = np.clip((pair - low) / (high - low or 0.001), 0, 1)
        frequency = theta ** (-2.0 * pair / rotary_dim)
        return (frequency * (1 - ramp) + frequency / self.factor * ramp).astype(np.float32)

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""

        def scale(x: float) -> float:
            return 0.1 * x * math.log(self.factor) + 1 if self.factor > 1 else 1.0

        return scale(self.mscale) / scale(self.mscale_all_dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / length)), after the rotation.

    This is the scale of Llama 4 (`attn_scale` in its reference code); keys have none.
    """

    beta: float
    length: int

    def at(self, positions: Int[Array, " T"]) -> Float32[Array, " T"]:
        """Returns the scale of the query at each position."""
        return 1 + self.beta * jnp.log1p((positions // self.length).astype(jnp.float32))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one kind of layer: the rotated dims of a head, and the frequency base.

    With `num_turning`, only so many pairs of dims turn, those of the highest frequencies; the
    frequency of the others is 0 ("proportional" in Hugging Face's configs).
    """

    rotary_dim: int
    theta: float
    num_turning: int | None = None
    yarn: Yarn | None = None
    query_scale: QueryScale | None = None


class Rotation(NamedTuple):
    """What positions do to q and k: both are rotated, then q is scaled, if at all."""

    cos: Float32[Array, "T A"]
    sin: Float32[Array, "T A"]
    query_scale: Float32[Array, " T"] | None = None


def rotation(positions: Int[Array, " T"], config: RopeConfig) -> Rotation:
    """Returns the rotation of tokens at these positions."""
    cos, sin = rope_angles(
        positions,
        rotary_dim=config.rotary_dim,
        theta=config.theta,
        num_turning=config.num_turning,
        yarn=config.yarn,
    )
    scale = None if config.query_scale is None else config.query_scale.at(positions)
    return Rotation(cos, sin, scale)


def rope_angles(
    positions: Int[Array, " T"],
    *,
    rotary_dim: int,
    theta: float,
    num_turning: int | None = None,
    yarn: Yarn | None = None,
) -> CosSin:
    """Returns (cos, sin) of the angles by which q and k at these positions are rotated."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    times = positions.astype(jnp.float32)[:, None]
    if yarn is None:
        frequency = theta**-exponent
    else:
        frequency = jnp.asarray(yarn.frequencies(rotary_dim, theta))
    if num_turning is not None:
        frequency = jnp.where(jnp.arange(rotary_dim // 2) < num_turning, frequency, 0.0)
    angles = times * frequency[None, :]
    if yarn is not None and yarn.amplitude != 1:
        return jnp.cos(angles) * yarn.amplitude, jnp.sin(angles) * yarn.amplitude
    return jnp.cos(angles), jnp.sin(angles)
