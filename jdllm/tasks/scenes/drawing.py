"""Draws scenes: flat colours on a flat ground, with soft edges by supersampling."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, UInt8

from jdllm.tasks.scenes import outlines
from jdllm.tasks.scenes.scene import Scene, Shape

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 38),
    "orange": (246, 136, 24),
    "yellow": (250, 224, 48),
    "green": (28, 148, 64),
    "cyan": (54, 206, 220),
    "blue": (36, 72, 204),
    "purple": (124, 44, 164),
    "pink": (250, 146, 196),
    "white": (250, 250, 250),
    "gray": (132, 132, 132),
    "black": (16, 16, 16),
}
_RGB = {name: np.array(value, np.float32) for name, value in COLOURS.items()}
SAMPLES = 4  # per pixel, in each direction
SHORTEST_SIDE = 64  # pixels; in a smaller picture a small star is a blot


def check_size(size: tuple[int, int]) -> None:
    """Raises ValueError for a (height, width) in which scenes cannot be drawn."""
    if min(size) < SHORTEST_SIDE or max(size) > 2 * min(size):
        raise ValueError(
            f"{size=} must be (height, width) of at least {SHORTEST_SIDE} pixels each, one at most "
            "twice the other"
        )


def render(
    scene: Scene, size: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Returns the picture of a scene, at its own size or at another one of the same proportions."""
    height, width = scene.size if size is None else size
    check_size((height, width))
    if height * scene.size[1] != width * scene.size[0]:
        raise ValueError(f"{size=} must have the proportions of the scene's {scene.size}")
    picture = np.empty((height, width, 3), np.float32)
    picture[:] = _RGB[scene.ground]
    for shape in scene.shapes:
        _draw(picture, shape)
    picture += 0.5
    return picture.astype(np.uint8)


def _draw(picture: Float[np.ndarray, "height width 3"], shape: Shape) -> None:
    outline = outlines.of(shape.shape, shape.size)
    unit = min(picture.shape[:2])
    radius, y, x = shape.radius * unit, shape.y * unit, shape.x * unit
    rows = slice(math.floor(y - outline.top * radius), math.ceil(y + outline.bottom * radius))
    columns = slice(math.floor(x - outline.side * radius), math.ceil(x + outline.side * radius))
    ys = (_samples(rows) - y) / radius
    xs = (_samples(columns) - x) / radius
    inside = outline.covers(ys[:, None], xs[None, :]).view(np.uint8)
    height, width = rows.stop - rows.start, columns.stop - columns.start
    # Sums of rows, then of columns: numpy adds whole rows much faster than pairs of axes.
    sums = inside.reshape(height, SAMPLES, width * SAMPLES).sum(axis=1, dtype=np.uint8)
    counts = sums.reshape(height, width, SAMPLES) @ _ONES
    coverage = counts * np.float32(1 / SAMPLES**2)
    part = picture[rows, columns]
    part += coverage[:, :, None] * (_RGB[shape.colour] - part)


_ONES = np.ones(SAMPLES, np.float32)


def _samples(pixels: slice) -> Float[np.ndarray, " samples"]:
    count = (pixels.stop - pixels.start) * SAMPLES
    return (np.arange(count, dtype=np.float32) + 0.5) / SAMPLES + pixels.start
