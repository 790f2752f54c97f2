"""Reflow: a flow learns from pairs of noise and what a trained flow, its teacher, makes of it.

Between independent noise and pictures many paths cross, where a flow has their mean velocity: it is
curved, so it needs many Euler steps. The ends of a flow's own paths are pairs whose straight lines
cross less, so a flow that learns them is straighter: rectified flow (Liu et al., "Flow Straight and
Fast", arXiv:2209.03003, section 2). A teacher with guidance makes pairs of the guided flow, whose
student needs none (InstaFlow, arXiv:2309.06380).
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, PRNGKeyArray

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.imagegen import pipeline_folder
from jdllm.train.recipe import Params
from jdllm.train.scenes import chunks, pool, sampling, update
from jdllm.train.scenes import networks as networks_lib
from jdllm.train.scenes.networks import FACTOR, LATENTS_DTYPE, SHIFT, TEXT, TRANSFORMER, Networks

_PAIRS = 2**32 - 1  # the randomness of a step is that of its number, which is smaller
_TOKENIZER = pathlib.Path("tokenizer") / "tokenizer.json"


def read_teacher(networks: Networks, name: str, params: Params) -> Params:
    """Returns a teacher's text encoder and transformer in compute dtype.

    `name` is a pipeline folder or a bundled model. Raises a ConfigError where its samples mean
    nothing to a run with the weights `params`: if their latents are not fixed yet, and for a
    teacher with another model, other token ids or another autoencoder.
    """
    if not float(params[FACTOR]):
        raise errors.ConfigError(
            f"teacher={name!r} needs a run that begins with its second stage: give --import-state "
            "a pipeline with the teacher's autoencoder, such as the teacher itself"
        )
    folder = source.bundled_folder(name) or pathlib.Path(name).expanduser()
    if not folder.is_dir():
        raise errors.ConfigError(f"teacher={name!r} is neither a folder nor a bundled model")
    try:
        _check_models(networks, folder)
        weights = networks_lib.read_params(networks, folder)
        _check_autoencoder(weights, params)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"teacher={name!r}: {error}") from error
    return {
        path: array.astype(networks.shapes[path].dtype)
        for path, array in update.own(weights, "flow").items()
    }


def _check_models(networks: Networks, folder: pathlib.Path) -> None:
    read = pipeline_folder.read(folder)
    for name in (TEXT, TRANSFORMER):
        if name not in read.models or read.models[name].config != networks.configs[name]:
            raise errors.ConfigError(f"its {name} is not that of the run's model_path")
    # Other parts of the file depend on the library that wrote it.
    own, its = (source.read_json(place / _TOKENIZER) for place in (networks.folder, folder))
    if own["model"]["vocab"] != its["model"]["vocab"]:
        raise errors.ConfigError(f"{_TOKENIZER} has other ids than that of the run")


def _check_autoencoder(weights: Params, own: Params) -> None:
    # A pipeline has weights in bfloat16, exported ones of a state are float32; both have the
    # numbers in full.
    dtypes = {path: jnp.bfloat16 for path in update.own(weights, "vae")}
    dtypes |= {SHIFT: jnp.float32, FACTOR: jnp.float32}

    def is_same(path: str) -> bool:
        its, mine = (np.asarray(one[path]).astype(dtypes[path]) for one in (weights, own))
        return np.array_equal(its, mine)

    other = [path for path in dtypes if not is_same(path)]
    if other:
        raise errors.ConfigError(
            "its autoencoder is not that of the run's weights, so its latents mean nothing there: "
            f"{len(other)} arrays differ, {', '.join(other[:3])}"
        )


def keys(seed: int, step: int) -> Iterator[PRNGKeyArray]:
    """Returns the keys of successive chunks of a run that begins, or goes on, at a step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _PAIRS), step)
    return (jax.random.fold_in(key, number) for number in itertools.count())


def pairs(
    networks: Networks,
    params: Params,
    size: tuple[int, int],
    key: PRNGKeyArray,
    ids: Int32[Array, "B L"],
    lens: Int32[Array, " B"],
    *,
    empty: chunks.Caption,
    steps: int,
    guidance: float,
) -> pool.Arrays:
    """Returns noise and the latents that `steps` Euler steps make of it, as the pool keeps them."""
    if guidance:
        ids = jnp.concatenate([ids, jnp.tile(empty.padded(ids.shape[1]), (len(ids), 1))])
        lens = jnp.concatenate([lens, jnp.full_like(lens, empty.length)])
    captions = sampling.captions(networks, params, ids, lens)
    pipeline, sigmas = networks.pipeline, jnp.asarray(networks.pipeline.sigmas(steps, *size))
    count = len(lens) // 2 if guidance else len(lens)
    shape = (count, *pipeline.latent_shape(*size))
    # Rounded before the steps: the pair that is kept is one of the teacher's.
    noise = jax.random.normal(key, shape).astype(LATENTS_DTYPE)

    def step(i: Int32[Array, ""], x: Array) -> Array:
        level = jnp.full(count, sigmas[i])
        of = (networks, params, x, level, captions, lens)
        v = sampling.guided_velocity(*of, guidance) if guidance else sampling.velocity(*of)
        return x + (sigmas[i + 1] - sigmas[i]) * v

    latents = jax.lax.fori_loop(0, steps, step, noise.astype(jnp.float32))
    return {pool.LATENTS: latents.astype(LATENTS_DTYPE), pool.NOISE: noise}
