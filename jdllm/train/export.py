"""Writes a trained model as an HF folder that `jdllm.serve` and others load."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping

import jax

from jdllm.models import loading
from jdllm.train import step


def write_hf(
    network: step.Network,
    params: Mapping[str, jax.Array],
    model_path: pathlib.Path,
    folder: pathlib.Path,
) -> pathlib.Path:
    """Writes model.safetensors and copies of the model folder's JSON and template files.

    Weights have the dtypes of the forward pass: routers and their biases stay float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in model_path.iterdir():
        if file.suffix in (".json", ".jinja") and folder.resolve() != model_path.resolve():
            shutil.copy(file, folder / file.name)
    weights = folder / "model.safetensors"
    architecture = network.config.spec.architecture
    loading.export_safetensors(architecture, network.config, network.cast(params), weights)
    return weights
