"""The bundled model without most of its layers: its tokenizer and its routes, much less to compile.

What it says is nonsense, but always the same nonsense.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import ml_dtypes  # noqa: F401 # makes bfloat16 known to numpy
import safetensors.numpy

from jdllm.checkpoint import source

NUM_LAYERS = 2  # a dense one and one of experts
WEIGHTS = "model.safetensors"
OF_A_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write(folder: pathlib.Path) -> None:
    """Writes the model to a new folder; without weights, where the package has none."""
    whole = source.bundled_model()
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    config = json.loads((folder / source.CONFIG_NAME).read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    (folder / source.CONFIG_NAME).write_text(json.dumps(config))
    if (whole / WEIGHTS).is_file():
        tensors = safetensors.numpy.load_file(whole / WEIGHTS)
        kept = {name: value for name, value in tensors.items() if _layer(name) < NUM_LAYERS}
        safetensors.numpy.save_file(kept, folder / WEIGHTS)


def _layer(name: str) -> int:
    found = OF_A_LAYER.match(name)
    return int(found[1]) if found else 0
