"""The golden Z-Image pipeline; see `image_launches` for what tests do with it."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from support import image_launches
from support.image_launches import NEGATIVE, PROMPTS, ROWS, begin_bucket, decode_bucket

from jdllm.runner.image import kind

__all__ = ["NEGATIVE", "PROMPTS", "ROWS", "begin_bucket", "decode_bucket"]

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "z_image"
PIPELINE = GOLDENS / "pipeline"
SQUARE, TALL = (96, 96), (128, 64)
TOKENS = 96  # the compiled length of captions; the longest prompt has 84
# Far more memory than a program needs for itself, so that a copy of it shows.
CONFIG = kind.ImageKindConfig(
    num_slots=512, num_entries=256, max_pixels=256 * 256, max_tokens=4 * TOKENS
)


def read_arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "runs.npz") as file:
        return dict(file)


def schedule_of_goldens(steps, size=SQUARE):
    """Returns the noise levels of the golden schedule by the formula: static shift 3."""
    del size
    config = json.loads((PIPELINE / "scheduler" / "scheduler_config.json").read_text())
    assert config["shift"] == 3.0 and not config["use_dynamic_shifting"]
    return image_launches.statically_shifted_levels(3.0, steps)


def draw(rng, is_guided):
    if not is_guided:
        return {}
    return {
        "guidance_scale": rng.choice([1.0, 2.5]),
        "cfg_truncation": rng.choice([0.3, 0.8, 1.0]),
        "cfg_normalization": rng.choice([0.0, 0.0, 1.0]),
    }


GOLDEN = image_launches.Golden(
    name="z_image",
    folder_path=lambda: PIPELINE,
    read_arrays=read_arrays,
    sizes=(SQUARE, TALL),
    runs={
        "g0": {},
        "g2.5": {"negative": NEGATIVE},
        "g2.5_noneg": {"negative": ""},
        "g2.5_trunc0.5_norm1": {
            "negative": NEGATIVE,
            "cfg_truncation": 0.5,
            "cfg_normalization": 1.0,
        },
    },
    config=CONFIG,
    tokens=TOKENS,
    short_tokens=32,
    levels=schedule_of_goldens,
    plain={"guidance_scale": 0.0},
    guided={"guidance_scale": 2.5},
    draw=draw,
    max_sequence_length=512,
)
folder, pipeline, arrays, initial = GOLDEN.folder, GOLDEN.pipeline, GOLDEN.arrays, GOLDEN.initial
Device, ask_again = GOLDEN.device, image_launches.ask_again


def step_bucket(size, rows=ROWS, *, is_guided=False, tokens=TOKENS):
    return image_launches.step_bucket(size, rows, is_guided=is_guided, tokens=tokens)


def encode_bucket(rows=ROWS, tokens=TOKENS):
    return image_launches.encode_bucket(rows, tokens)


def ask(prompt=PROMPTS[1], *, scale=0.0, negative=NEGATIVE, **options):
    """Returns a request, guided if it has a scale."""
    if scale > 0:
        options |= {"negative": negative, "guidance_scale": scale}
    return GOLDEN.ask(prompt, **options)
