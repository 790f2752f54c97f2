"""Samples of a flow: velocities as the engine's launches compute them, and Euler steps along them.

Captions are refined once for all steps. With `v` and `e` of a caption and the empty one, a guided
velocity is `v + scale (v - e)`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jdllm.train.recipe import Params
from jdllm.train.scenes import chunks
from jdllm.train.scenes.networks import LATENTS_DTYPE, TEXT, TRANSFORMER, Networks
from jdllm.train.scenes.objectives import Latents

Size = tuple[int, int]
Noise = Float[np.ndarray, "B C h w"]
Pictures = UInt8[Array, "B H W 3"]
# From a size, noise and captions: latents in the dtype of rings, and pictures for the oracle.
Sample = Callable[[Size, Noise, chunks.Ids, chunks.Lens], tuple[jax.Array, Pictures | None]]


def noise(random: np.random.Generator, shape: tuple[int, ...]) -> Noise:
    """Returns noise that is rounded before the steps, so that pairs with it are the sampler's."""
    return random.standard_normal(shape, np.float32).astype(LATENTS_DTYPE)


def captions(
    networks: Networks, params: Params, ids: Int32[Array, "B L"], lens: Int32[Array, " B"]
) -> Float[Array, "B L D"]:
    """Returns what the pipeline keeps of captions."""
    encoded = networks.module(TEXT, params).encode(ids, lens)
    return networks.module(TRANSFORMER, params).refine_captions(encoded, lens)


def with_empty(
    ids: Int32[Array, "B L"], lens: Int32[Array, " B"], empty: chunks.Caption
) -> tuple[Int32[Array, "2B L"], Int32[Array, " 2B"]]:
    """Returns captions and then, as often, the empty one: those of a guided velocity."""
    empty_ids = jnp.broadcast_to(empty.padded(ids.shape[1]), ids.shape)
    empty_lens = jnp.full_like(lens, empty.length)
    return jnp.concatenate([ids, empty_ids]), jnp.concatenate([lens, empty_lens])


def velocity(
    networks: Networks,
    params: Params,
    latents: Latents,
    sigma: Float32[Array, " B"],
    captions: Float[Array, "B L D"],
    lens: Int32[Array, " B"],
) -> Latents:
    """Returns the velocity of each row at its noise level."""
    return -networks.module(TRANSFORMER, params).denoise(latents, 1 - sigma, captions, lens)


def guided_velocity(
    networks: Networks,
    params: Params,
    latents: Latents,
    sigma: Float32[Array, " B"],
    captions: Float[Array, "2B L D"],
    lens: Int32[Array, " 2B"],
    scale: Float32[Array, ""] | float,
) -> Latents:
    """Returns guided velocities; the captions are those of `with_empty`."""
    twice = jnp.concatenate([latents, latents]), jnp.concatenate([sigma, sigma])
    own, empty = jnp.split(velocity(networks, params, *twice, captions, lens), 2)
    return own + scale * (own - empty)


def sample(
    networks: Networks,
    params: Params,
    size: Size,
    noise: Latents,
    ids: Int32[Array, "B L"],
    lens: Int32[Array, " B"],
    *,
    empty: chunks.Caption,
    steps: int,
    guidance: float,
) -> Latents:
    """Returns the latents that `steps` Euler steps make of noise."""
    count = len(lens)
    if guidance:
        ids, lens = with_empty(ids, lens, empty)
    refined = captions(networks, params, ids, lens)
    sigmas = jnp.asarray(networks.pipeline.sigmas(steps, *size))

    def step(i: Int32[Array, ""], x: Array) -> Array:
        level = jnp.full(count, sigmas[i])
        of = (networks, params, x, level, refined, lens)
        v = guided_velocity(*of, guidance) if guidance else velocity(*of)
        return x + (sigmas[i + 1] - sigmas[i]) * v

    return jax.lax.fori_loop(0, steps, step, noise.astype(jnp.float32))
