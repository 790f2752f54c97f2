"""The golden Qwen-Image pipeline: published class names, tiny sizes, outputs of diffusers 0.42.1.

Its weights are not stored: each tensor is drawn from its name, as the makers of the arrays did.
What no forward pass may read is NaN here: the vision tower, the head, the encoder of images, and
of every kernel over time all taps but the last.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import tempfile
import zlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from support import image_launches
from support.image_launches import NEGATIVE
from support.once import once

from jdllm.runner.image import kind

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "qwen_image"
FILES = {
    "text_encoder": "model",
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
UNUSED = ("visual.", "lm_head.", "encoder.", "quant_conv.")
PREFIX = 34  # ids of the template before the prompt
SIZES = (80, 80), (112, 64)  # 5x5 and 7x4 tokens
PATCH = 16  # pixels per token, on each side


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of text, transformer, vae or runs."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def shapes(component: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the checkpoint that diffusers has written."""
    stored = json.loads((GOLDENS / "tensors.json").read_text())[component]
    return {name: tuple(shape) for name, shape in stored.items()}


def config(component: str) -> dict:
    return json.loads((GOLDENS / "pipeline" / component / "config.json").read_text())


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the tensor of this name; a kernel over time keeps its scale with one tap."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    if len(shape) > 1 and not name.endswith("gamma"):
        fan_in = np.prod(shape[1:]) / (shape[2] if len(shape) == 5 else 1)
        scale = 1.0 if "embed_tokens" in name else fan_in**-0.5
        array = scale * rng.standard_normal(shape)
    elif name.endswith("bias"):
        array = 0.1 * rng.standard_normal(shape)
    else:
        array = rng.uniform(0.6, 1.4, shape) * (1.7 if ".attn.norm_" in name else 1.0)
    if name.startswith(UNUSED) or ".time_conv." in name:
        array[...] = np.nan
    elif len(shape) == 5:
        array[:, :, :-1] = np.nan
    return array.astype(np.float32)


@functools.cache
def tensors(component: str) -> dict[str, np.ndarray]:
    return {name: tensor(name, shape) for name, shape in shapes(component).items()}


@once
def _kept() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="golden-qwen-image-")


@once
def pipeline_path() -> pathlib.Path:
    """Returns the folder of the whole pipeline, which lives as long as the process."""
    path = pathlib.Path(_kept().name) / "pipeline"
    shutil.copytree(GOLDENS / "pipeline", path)
    for component, name in FILES.items():
        safetensors.numpy.save_file(tensors(component), path / component / f"{name}.safetensors")
    return path


def params(one, component: str, dtype: str = "float32"):
    """Returns (graphdef, params) of a component with the golden checkpoint."""
    parsed = one.read(config(component))
    graphdef, abstract = one.abstract(parsed, jnp.dtype(dtype))
    fills = one.match(parsed, shapes(component))
    made = {path: np.full(array.shape, np.nan, array.dtype) for path, array in abstract.items()}
    for of_path in fills.values():
        for fill in of_path:
            fill.row.write(made[fill.row.target], tensors(component)[fill.tensor])
    return graphdef, {path: jnp.asarray(array) for path, array in made.items()}


def levels(steps: int, size: tuple[int, int]) -> list[float]:
    """Returns the noise levels of the golden schedule by the formula."""
    schedule = json.loads((GOLDENS / "pipeline/scheduler/scheduler_config.json").read_text())
    return image_launches.shifted_levels(schedule, steps, size[0] // PATCH * (size[1] // PATCH))


def draw(rng, is_guided):
    return {"true_cfg_scale": rng.choice([1.5, 4.0]) if is_guided else 4.0}


GOLDEN = image_launches.Golden(
    name="qwen_image",
    folder_path=pipeline_path,
    read_arrays=lambda: arrays("runs"),
    sizes=SIZES,
    runs={
        "nocfg": {},
        "cfg4": {"negative": NEGATIVE},
        "cfg1.5": {"negative": NEGATIVE, "true_cfg_scale": 1.5},
        "cfg4_space": {"negative": " "},
        "cfg4_empty": {"negative": ""},
    },
    # Far more memory than a program needs for itself, so that a copy of it shows.
    config=kind.ImageKindConfig(
        num_slots=512,
        num_entries=256,
        max_pixels=256 * 256,
        max_tokens=PREFIX + 384,
        window_steps=3,  # golden runs have four
    ),
    tokens=PREFIX + 96,  # the longest prompt has 81
    short_tokens=PREFIX + 16,
    levels=levels,
    plain={"true_cfg_scale": 4.0},  # the default, which asks for nothing by itself
    guided={"true_cfg_scale": 4.0},
    draw=draw,
    max_sequence_length=512,
)
