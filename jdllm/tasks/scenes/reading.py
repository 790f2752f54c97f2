"""Reads a picture of flat shapes back: what shapes, in what colours and sizes, where.

The frame of a picture tells the colour of its ground. What differs from the ground falls into
connected regions. A region's colour is that of its flat pixels (soft edges mix two colours, and
may look like a third); its shape follows from its holes and moments. What differs from a region's
colour well inside it is a shape that lies on it.

This module shares no code and no number with the generator of scenes (`jdllm.tasks.scenes`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, UInt8

from jdllm.tasks.scenes import geometry
from jdllm.tasks.scenes.geometry import Mask

# What people call these colours, not what any program draws.
NAMED: dict[str, tuple[int, int, int]] = {
    "red": (220, 25, 30),
    "orange": (250, 140, 15),
    "yellow": (250, 225, 40),
    "green": (25, 150, 60),
    "cyan": (50, 205, 220),
    "blue": (30, 70, 210),
    "purple": (120, 40, 165),
    "pink": (250, 150, 195),
    "white": (250, 250, 250),
    "gray": (130, 130, 130),
    "black": (10, 10, 10),
}
_NAMES = tuple(NAMED)
_TABLE = np.array([NAMED[name] for name in _NAMES], np.float32)

# Distances in RGB, of 441 from black to white.
NAME_TOLERANCE = 70.0  # farther from every named colour has no name
DIFFERENT = 38.0  # from the colour around it; noise of 6 per value reaches half of it
FLAT = 60.0  # between the two neighbours of a pixel; an edge is steeper
EDGE_SHARE = 0.45  # of the strongest difference beside it; less is a soft edge, not the shape
SMALLEST = 0.004  # share of the picture; less is a speck
FRAME = 2  # pixels along the border that belong to the ground
FRAME_SHARE = 0.9  # of the frame must have one colour
SMALLEST_HOLE = 0.0012  # share of the picture; less is noise
GROUND_IN_HOLE = 0.1  # share of flat ground pixels that makes a hole one
# A shape's longer side, in shares of the picture's shorter side.
SMALL_UP_TO, MEDIUM_UP_TO = 0.252, 0.395

Pixels = Float[np.ndarray, "height width 3"]
Colour = Float[np.ndarray, " 3"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One shape in a picture: its centroid (y, x) in pixels; None is what cannot be named.

    `inside` is the index of the shape in which it lies.
    """

    shape: str | None
    colour: str | None
    size: str
    y: float
    x: float
    inside: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a picture of `height` by `width` pixels shows."""

    height: int
    width: int
    ground: str | None
    shapes: tuple[Seen, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """A region with all that lies in it: `outline` has no holes at all."""

    seen: Seen
    outline: Mask
    nested: tuple[_Region, ...]


def read(picture: UInt8[np.ndarray, "height width 3"]) -> Reading:
    """Returns what a picture shows; ValueError for what is no RGB picture of bytes."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(
            f"a picture is uint8 [height, width, 3], not {picture.dtype} {list(picture.shape)}"
        )
    pixels = picture.astype(np.float32)
    height, width, _ = picture.shape
    frame = np.ones((height, width), bool)
    frame[FRAME:-FRAME, FRAME:-FRAME] = False
    ground = np.median(pixels[frame], axis=0)
    is_even = (_distance(pixels[frame], ground) <= DIFFERENT).mean() >= FRAME_SHARE
    everywhere = np.ones((height, width), bool)
    regions = _regions(pixels, everywhere, ground, _is_flat(pixels))
    return Reading(
        height=height,
        width=width,
        ground=_name(ground) if is_even else None,
        shapes=_nest(regions),
    )


def _nest(regions: list[_Region]) -> tuple[Seen, ...]:
    """Returns the shapes in a row; each knows the one in which it lies."""
    shapes: list[Seen] = []
    for region in regions:
        around = next((i for i, other in enumerate(regions) if _is_within(region, other)), None)
        shapes.append(dataclasses.replace(region.seen, inside=around))
    for i, region in enumerate(regions):
        shapes += [dataclasses.replace(inner.seen, inside=i) for inner in region.nested]
    return tuple(shapes)


def _is_within(region: _Region, other: _Region) -> bool:
    return region is not other and bool((other.outline | ~region.outline).all())


def _regions(pixels: Pixels, where: Mask, background: Colour, is_flat: Mask) -> list[_Region]:
    """Returns the regions within `where` that differ from the colour around them."""
    distance = _distance(pixels, background)
    # Two shapes may be so near that their soft edges meet; each is cut where its own edge is.
    least = np.maximum(DIFFERENT, EDGE_SHARE * geometry.strongest_near(distance))
    differs = where & (distance > least)
    is_ground = is_flat & (distance <= DIFFERENT)
    labels, count = geometry.components(differs, has_diagonals=True)
    areas = np.bincount(labels.ravel(), minlength=count + 1)
    smallest = SMALLEST * labels.size
    taken = np.zeros_like(differs)
    found = []
    for label in sorted(range(1, count + 1), key=lambda i: -areas[i]):
        mask = labels == label
        if areas[label] < smallest or (mask & taken).any():
            continue
        # A shape on another one may seem to lie in a hole: the edge between two colours passes
        # through others, the ground's among them. Such a hole is no more than an edge wide.
        real, solid = [], mask
        for hole in geometry.holes(mask):
            area = hole.sum()
            is_large = area >= SMALLEST_HOLE * hole.size
            if is_large and (hole & is_ground).sum() >= GROUND_IN_HOLE * area:
                real.append(hole)
            else:
                solid = solid | hole
        taken |= solid
        found.append(_region(pixels, solid, real, background, is_flat))
    return found


def _region(
    pixels: Pixels, solid: Mask, real_holes: list[Mask], background: Colour, is_flat: Mask
) -> _Region:
    colour = _own_colour(pixels, solid, background, is_flat)
    # Two pixels from the edge no colour of the edge is left.
    core = geometry.shrunk(geometry.shrunk(solid))
    nested = _regions(pixels, core, colour, is_flat) if core.any() else []
    contrast = colour - background
    share = (pixels - background) @ contrast / max(float(contrast @ contrast), 1.0)
    weights = np.where(geometry.grown(solid), np.clip(share, 0, 1), 0)
    for inner in nested:
        weights[geometry.grown(inner.outline)] = 1
    if not weights.any():
        # Its colours differ from the background's, but not in their middle. Such is noise.
        weights = solid.astype(np.float64)
    outline = solid.copy()
    for hole in real_holes:
        outline |= hole
    found = geometry.moments(weights)
    if real_holes:
        shape = "ring" if len(real_holes) == 1 else None
    else:
        shape = geometry.solid_shape(found)
    seen = Seen(
        shape=shape, colour=_name(colour), size=_size_word(weights > 0.5), y=found.y, x=found.x
    )
    return _Region(seen, outline, tuple(nested))


def _own_colour(pixels: Pixels, mask: Mask, background: Colour, is_flat: Mask) -> Colour:
    """Returns the middle of the commonest named colour among a region's flat pixels."""
    flat = pixels[mask & is_flat]
    if len(flat) < 3:
        # So thin that all of it is edge: what is farthest from the background is mixed least.
        every = pixels[mask]
        distance = _distance(every, background)
        flat = every[distance >= np.quantile(distance, 0.75)]
    names = np.argmin(_distance(flat[:, None], _TABLE[None]), axis=1)
    commonest = np.bincount(names, minlength=len(_NAMES)).argmax()
    return np.median(flat[names == commonest], axis=0)


def _size_word(mask: Mask) -> str:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return "small"
    longer = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1
    share = longer / min(mask.shape)
    return "small" if share <= SMALL_UP_TO else "medium" if share <= MEDIUM_UP_TO else "large"


def _is_flat(pixels: Pixels) -> Mask:
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    down = _distance(padded[2:, 1:-1], padded[:-2, 1:-1])
    across = _distance(padded[1:-1, 2:], padded[1:-1, :-2])
    return np.maximum(down, across) < FLAT


def _name(colour: Colour) -> str | None:
    distances = _distance(_TABLE, colour)
    nearest = int(distances.argmin())
    return _NAMES[nearest] if distances[nearest] <= NAME_TOLERANCE else None


def _distance(
    colours: Float[np.ndarray, "*n 3"], other: Float[np.ndarray, "*m 3"]
) -> Float[np.ndarray, "*n"]:
    difference = colours - other
    return np.sqrt(np.einsum("...c,...c->...", difference, difference))
