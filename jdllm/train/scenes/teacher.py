"""Reads the teacher of a run and tells whether its samples mean something there."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.pipelines import folder as pipeline_folder
from jdllm.train.recipe import Params
from jdllm.train.scenes import update
from jdllm.train.scenes.networks import FACTOR, SHIFT, TEXT, TRANSFORMER, Networks, read_params

_TOKENIZER = pathlib.Path("tokenizer") / "tokenizer.json"


def read(networks: Networks, name: str, params: Params) -> Params:
    """Returns a teacher's weights, those of text encoder and transformer in compute dtype.

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
        weights = read_params(networks, folder)
        _check_autoencoder(weights, params)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"teacher={name!r}: {error}") from error
    return weights | {
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
