"""Writes a trained pipeline as a diffusers folder that `jdllm serve` and others load."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp

from jdllm.checkpoint import export, source
from jdllm.pipelines import interface, request_defaults
from jdllm.train.recipe import Params
from jdllm.train.scenes.networks import FACTOR, SHIFT, VAE, Networks

_FILES = {"text_encoder": "model", "transformer": "diffusion_pytorch_model"}
_OTHER = "diffusion_pytorch_model"


def write(networks: Networks, params: Params, *, guidance_scale: float | None = None) -> None:
    """Writes the weights in bfloat16 beside the configs; the autoencoder with its encoder.

    The autoencoder's config gets the numbers by which its latents are shifted and scaled. A
    `guidance_scale` replaces that of requests which do not say.
    """
    for name, one in networks.components.items():
        prefix = interface.prefix_of(name)
        own = {
            path.removeprefix(prefix): array.astype(jnp.bfloat16)
            for path, array in params.items()
            if path.startswith(prefix)
        }
        file = networks.folder / name / f"{_FILES.get(name, _OTHER)}.safetensors"
        export.export(file, one.weight_rows(networks.configs[name]), own)
    latents = {"shift_factor": float(params[SHIFT]), "scaling_factor": float(params[FACTOR])}
    _change(networks.folder / VAE / "config.json", latents)
    if guidance_scale is not None:
        file = networks.folder / request_defaults.FILE_NAME
        _change(file, {"guidance_scale": guidance_scale})


def _change(file: pathlib.Path, changes: dict[str, float]) -> None:
    """Writes values into a JSON file, which may be missing."""
    values = source.read_optional_json(file) | changes
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
