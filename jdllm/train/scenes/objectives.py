"""What the two stages minimise.

The autoencoder: the error of pixels and of differences between neighbours, which keeps edges
sharp, and a small pull of the latents towards a normal distribution. The flow: the squared error
of the velocity `noise - clean` at `(1 - sigma) * clean + sigma * noise`. Noise levels are spread
as the schedule spreads the steps of a sampler.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, UInt8

from jdllm.train.recipe import Params
from jdllm.train.scenes.config import SceneConfig
from jdllm.train.scenes.networks import (
    FACTOR,
    LEAST_DEVIATION,
    SHIFT,
    TEXT,
    TRANSFORMER,
    VAE,
    Networks,
)
from jdllm.train.scenes.update import Metrics

Pictures = UInt8[Array, "B H W 3"]
Latents = Float32[Array, "B C h w"]

_LEAST_MAGNITUDE = 1e-3  # of errors of clean latents, which have a standard deviation of 1


def vae_loss(
    networks: Networks, config: SceneConfig, params: Params, pictures: Pictures, key: PRNGKeyArray
) -> tuple[Float32[Array, ""], Metrics]:
    """Returns the loss of reconstructions from drawn latents."""
    x = to_images(pictures)
    vae = networks.module(VAE, params)
    mean, log_variance = vae.encode(x)
    noise = jax.random.normal(key, mean.shape)
    y = vae.decode_denormalised(mean + jnp.exp(log_variance / 2) * noise)
    error = jnp.mean(jnp.abs(y - x)) + jnp.mean(jnp.square(y - x))
    down, across = (
        jnp.mean(jnp.abs(jnp.diff(y, axis=axis) - jnp.diff(x, axis=axis))) for axis in (1, 2)
    )
    edges = down + across
    kl = 0.5 * jnp.mean(jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance)
    total = error + config.edge_weight * edges + config.kl_weight * kl
    return total, {"error": error, "edges": edges, "kl": kl}


def flow_loss(
    networks: Networks,
    params: Params,
    latents: Latents,
    noise: Latents,
    ids: Int32[Array, "B L"],
    lens: Int32[Array, " B"],
    key: PRNGKeyArray,
) -> tuple[Float32[Array, ""], Metrics]:
    """Returns the mean squared error of velocities at noise levels that are drawn."""
    x, sigma = _noised(networks, latents, noise, key)
    predicted = velocities(networks, params, x, sigma, ids, lens)
    return jnp.mean(jnp.square(predicted - (noise - latents))), {}


def policy_loss(
    networks: Networks,
    params: Params,
    old: Params,
    latents: Latents,
    advantage: Float32[Array, " B"],
    noise: Latents,
    ids: Int32[Array, "B L"],
    lens: Int32[Array, " B"],
    key: PRNGKeyArray,
    *,
    trust: float,
) -> tuple[Float32[Array, ""], Metrics]:
    """Returns the loss of DiffusionNFT (arXiv:2509.16117, section 3) with its beta 1.

    With `r = (1 + clip(advantage / trust, -1, 1)) / 2` it weights the errors of `v_new` by `r` and
    those of `2 v_old - v_new` by `1 - r`. An error is the mean square of that of the clean latents,
    each sample's divided by its mean magnitude: one that is far off cannot push the harder for it.
    The metric `drift` is the mean square of `v_new - v_old`.
    """
    x, sigma = _noised(networks, latents, noise, key)
    before = jax.lax.stop_gradient(velocities(networks, old, x, sigma, ids, lens))
    moved = velocities(networks, params, x, sigma, ids, lens) - before
    off, level = before - (noise - latents), sigma[:, None, None, None]
    towards, away = (_normalized_error(level * (off + sign * moved)) for sign in (1, -1))
    r = (1 + jnp.clip(advantage / trust, -1, 1)) / 2
    return jnp.mean(r * towards + (1 - r) * away), {"drift": jnp.mean(jnp.square(moved))}


def _normalized_error(difference: Latents) -> Float32[Array, " B"]:
    """Returns each row's mean square over its mean magnitude, which has no gradient."""
    square, magnitude = (jnp.mean(of(difference), axis=(1, 2, 3)) for of in (jnp.square, jnp.abs))
    return square / jnp.maximum(jax.lax.stop_gradient(magnitude), _LEAST_MAGNITUDE)


def _noised(
    networks: Networks, latents: Latents, noise: Latents, key: PRNGKeyArray
) -> tuple[Latents, Float32[Array, " B"]]:
    """Returns latents at noise levels that are drawn, and the levels."""
    sigma = noise_levels(key, len(latents), networks.schedule.shift)
    level = sigma[:, None, None, None]
    return (1 - level) * latents + level * noise, sigma


def velocities(
    networks: Networks,
    params: Params,
    latents: Latents,
    sigma: Float32[Array, " B"],
    ids: Int32[Array, "B L"],
    lens: Int32[Array, " B"],
) -> Latents:
    """Returns what the served pipeline predicts, in one differentiable forward."""
    encoder = networks.module(TEXT, params)
    table = encoder.word_embeddings[...]
    # A product instead of a lookup, whose gradient adds up the many padding tokens one by one.
    words = jax.nn.one_hot(ids, len(table), dtype=table.dtype) @ table
    captions = encoder.encode_words(words, lens)
    return -networks.module(TRANSFORMER, params)(latents, 1 - sigma, captions, lens)


def noise_levels(key: PRNGKeyArray, count: int, shift: float) -> Float32[Array, " count"]:
    """Returns shifted levels of uniform ones, one in each of `count` equal parts of 0 to 1."""
    level = (jnp.arange(count) + jax.random.uniform(key, (count,))) / count
    return shift * level / (1 + (shift - 1) * level)


def clean_latents(networks: Networks, params: Params, pictures: Pictures) -> Latents:
    """Returns the means of latents as the pipeline holds them; before the switch as they are."""
    mean, _ = networks.module(VAE, params).encode(to_images(pictures))
    factor = params[FACTOR]
    return jnp.where(factor == 0, mean, (mean - params[SHIFT]) * factor)


def decoded(networks: Networks, params: Params, latents: Latents) -> Float32[Array, "B H W 3"]:
    """Returns the images of the pipeline's latents."""
    z = latents / params[FACTOR] + params[SHIFT]
    return networks.module(VAE, params).decode_denormalised(z)


def to_images(pictures: Pictures) -> Float32[Array, "B H W 3"]:
    """Returns pictures as values -1 to 1."""
    return pictures.astype(jnp.float32) / 127.5 - 1


def measured(latents: Latents) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Returns shift and factor that give latents mean 0 and variance 1."""
    return jnp.mean(latents), 1 / jnp.maximum(jnp.std(latents), LEAST_DEVIATION)
