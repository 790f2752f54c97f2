"""The golden FLUX pipeline: its folder, its weights, and the arrays that diffusers 0.42.1 made.

Three components have weights that are drawn again (`drawn_weights`) instead of stored. The second
tokenizer is stored without its normaliser, a large table that changes nothing in these prompts.
"""

from __future__ import annotations

import atexit
import functools
import json
import pathlib
import shutil
import tempfile

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from support import drawn_weights, image_launches
from support.once import once

from jdllm.models.images import registry
from jdllm.runner.image import kind

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "flux"
STORED = GOLDENS / "pipeline"
PROMPTS, NEGATIVE = image_launches.PROMPTS, image_launches.NEGATIVE
SQUARE, TALL = (96, 96), (112, 64)
PATCH = 16  # pixels per token, on each side
CLIP_IDS, LENGTH = 77, 64  # the ids of every prompt for CLIP, and those for T5 in most runs
_CLASSES = {
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "T5EncoderModel",
    "transformer": "FluxTransformer2DModel",
}
_SEEDS = {"text_encoder": 12, "text_encoder_2": 15, "transformer": 13}
_PREFIXES = {"text_encoder": "text_model."}
_FILES = {"transformer": "diffusion_pytorch_model.safetensors"}


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file: text, transformer or runs."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


def config_json(name: str) -> dict:
    return json.loads((STORED / name / "config.json").read_text())


@functools.cache
def tensors(name: str) -> dict[str, np.ndarray]:
    """Returns the checkpoint of a component."""
    one = registry.COMPONENTS[_CLASSES[name]]
    config = one.read(config_json(name))
    prefix = _PREFIXES.get(name, "")
    return drawn_weights.draw(one, config, seed=_SEEDS[name], prefix=prefix)


@functools.cache
def loaded(name: str, dtype: str = "float32"):
    """Returns (graphdef, params) of a component."""
    one = registry.COMPONENTS[_CLASSES[name]]
    config = one.read(config_json(name))
    graphdef, shapes = one.abstract(config, jnp.dtype(dtype))
    params = {path: np.full(shape.shape, np.nan, shape.dtype) for path, shape in shapes.items()}
    for row in one.weight_rows(config):
        row.write(params[row.target], tensors(name)[_PREFIXES.get(name, "") + row.name])
    return graphdef, {path: jnp.asarray(array) for path, array in params.items()}


@once
def folder() -> pathlib.Path:
    """Returns the complete pipeline folder, which lives as long as the process."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="golden-flux-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    shutil.copytree(STORED, made, dirs_exist_ok=True)
    for name in _CLASSES:
        file = made / name / _FILES.get(name, "model.safetensors")
        safetensors.numpy.save_file(tensors(name), file)
    return made


def levels(steps: int, size: tuple[int, int]) -> list[float]:
    """Returns the noise levels of the golden schedule by the formula."""
    schedule = json.loads((STORED / "scheduler" / "scheduler_config.json").read_text())
    return image_launches.shifted_levels(schedule, steps, size[0] // PATCH * (size[1] // PATCH))


def draw(rng, is_guided):
    return {
        "guidance_scale": rng.choice([1.0, 3.5, 7.0]),
        "true_cfg_scale": rng.choice([1.5, 2.0]) if is_guided else 1.0,
    }


GOLDEN = image_launches.Golden(
    name="flux",
    folder_path=folder,
    read_arrays=lambda: arrays("runs"),
    sizes=(SQUARE, TALL),
    runs={
        "g3.5": {},
        "g3.5_truecfg2": {"negative": NEGATIVE},
        "g3.5_len512": {"length": 512},
    },
    # Far more memory than a program needs for itself, so that a copy of it shows.
    config=kind.ImageKindConfig(
        num_slots=512,
        num_entries=256,
        max_pixels=256 * 256,
        max_tokens=CLIP_IDS + 512,
        window_steps=3,  # golden runs have four
    ),
    tokens=CLIP_IDS + LENGTH + 16,  # which are masked
    short_tokens=CLIP_IDS + LENGTH,
    long_tokens=CLIP_IDS + 512,
    levels=levels,
    plain={"guidance_scale": 3.5},
    guided={"guidance_scale": 3.5, "true_cfg_scale": 2.0},
    draw=draw,
    max_sequence_length=LENGTH,
)
