"""The golden autoencoder: a tiny `AutoencoderKL` of diffusers with random weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jdllm.checkpoint import weight_table
from jdllm.models import loading
from jdllm.models.images import autoencoder_kl

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "z_image"
FOLDER = GOLDEN / "pipeline" / "vae"
HF: Mapping[str, Any] = json.loads((FOLDER / "config.json").read_text())
PUBLISHED = {
    **HF,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "norm_num_groups": 32,
}


def tensors() -> dict[str, np.ndarray]:
    """Returns the golden checkpoint by tensor name."""
    return safetensors.numpy.load_file(FOLDER / "diffusion_pytorch_model.safetensors")


def random_tensors(hf: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a checkpoint of this config, with weights that keep the size of activations."""
    rng = np.random.RandomState(seed)
    config = autoencoder_kl.WITH_ENCODER.read(hf)
    found = {}
    for row in autoencoder_kl.WITH_ENCODER.weight_rows(config):
        draw = rng.standard_normal(row.shape)
        if len(row.shape) > 1:
            found[row.name] = draw / np.prod(row.shape[1:]) ** 0.5
        else:
            found[row.name] = 0.1 * draw + row.name.endswith(("norm1.weight", "norm2.weight"))
    return {name: array.astype(np.float32) for name, array in found.items()}


def params(
    hf: Mapping[str, Any], found: Mapping[str, np.ndarray], *, dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Returns all parameters of decoder and encoder, filled by the weight table."""
    component = autoencoder_kl.WITH_ENCODER
    config = component.read(hf)
    arrays = component.abstract(config, jnp.dtype(dtype))[1]
    staging = {path: np.full(array.shape, np.nan, dtype) for path, array in arrays.items()}
    rows = component.weight_rows(config)
    fills = weight_table.match(rows, {name: array.shape for name, array in found.items()})
    for path, of_path in fills.items():
        for fill in of_path:
            fill.row.write(staging[path], found[fill.tensor])
    return {path: jnp.asarray(array) for path, array in staging.items()}


def model(
    hf: Mapping[str, Any] = HF,
    found: Mapping[str, np.ndarray] | None = None,
    *,
    dtype: Any = jnp.float32,
) -> autoencoder_kl.AutoencoderKLWithEncoder:
    """Returns decoder and encoder with these tensors, or with those of the golden."""
    graphdef, _ = autoencoder_kl.WITH_ENCODER.abstract(
        autoencoder_kl.WITH_ENCODER.read(hf), jnp.dtype(dtype)
    )
    return loading.merge(graphdef, params(hf, found or tensors(), dtype=dtype))
