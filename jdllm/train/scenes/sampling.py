"""Velocities as the engine's launches compute them, to make pictures from noise.

Captions are refined once for all steps. With `v` and `e` of a caption and the empty one, a guided
velocity is `v + scale (v - e)`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jdllm.train.recipe import Params
from jdllm.train.scenes import chunks
from jdllm.train.scenes.networks import TEXT, TRANSFORMER, Networks
from jdllm.train.scenes.objectives import Latents


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
