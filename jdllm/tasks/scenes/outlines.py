"""The five outlines, as tests of points: what is drawn, and how far it reaches.

A shape of radius 1 has its centroid at the origin; y points down. All five have about the same
extent, so that a radius says which size word fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

SQUARE_HALF = 0.9
TRIANGLE_RADIUS = 1.2  # of the circle through its corners, as for the star
STAR_RADIUS = 1.12
# A large ring must have room for a small shape, a small ring a band of some pixels.
RING_HOLES = {"small": 0.5, "medium": 0.57, "large": 0.67}

Points = Float[np.ndarray, "..."]
Covers = Callable[[Points, Points], Bool[np.ndarray, "y x"]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """How far a shape of radius 1 reaches from its centroid: up, down, aside, and at most.

    `covers(y [y, 1], x [1, x])` says which points belong to the shape.
    """

    top: float
    bottom: float
    side: float
    reach: float
    covers: Covers


def _circle(y: Points, x: Points) -> Bool[np.ndarray, "y x"]:
    return y * y + x * x <= 1


def _square(y: Points, x: Points) -> Bool[np.ndarray, "y x"]:
    return (np.abs(y) <= SQUARE_HALF) & (np.abs(x) <= SQUARE_HALF)


def _triangle(y: Points, x: Points) -> Bool[np.ndarray, "y x"]:
    slope = (y + TRIANGLE_RADIUS) / math.sqrt(3)
    return (y <= TRIANGLE_RADIUS / 2) & (np.abs(x) <= slope)


# Unit vectors to the five tips, the first one straight up.
_TIPS = tuple((-math.cos(0.4 * math.pi * k), math.sin(0.4 * math.pi * k)) for k in range(5))


def _star(y: Points, x: Points) -> Bool[np.ndarray, "y x"]:
    """Five lines through every second tip; a point of a pentagram is beyond at most one."""
    limit = STAR_RADIUS * math.cos(0.4 * math.pi)
    beyond = sum((y * tip_y <= limit - x * tip_x).view(np.int8) for tip_y, tip_x in _TIPS)
    return np.asarray(beyond) >= 4


def _ring(hole: float) -> Covers:
    def covers(y: Points, x: Points) -> Bool[np.ndarray, "y x"]:
        square = y * y + x * x
        return (square <= 1) & (square >= hole * hole)

    return covers


_SOLIDS = {
    "circle": Outline(covers=_circle, top=1, bottom=1, side=1, reach=1),
    "square": Outline(
        covers=_square,
        top=SQUARE_HALF,
        bottom=SQUARE_HALF,
        side=SQUARE_HALF,
        reach=SQUARE_HALF * math.sqrt(2),
    ),
    "triangle": Outline(
        covers=_triangle,
        top=TRIANGLE_RADIUS,
        bottom=TRIANGLE_RADIUS / 2,
        side=TRIANGLE_RADIUS * math.sqrt(3) / 2,
        reach=TRIANGLE_RADIUS,
    ),
    "star": Outline(
        covers=_star,
        top=STAR_RADIUS,
        bottom=STAR_RADIUS * math.cos(math.pi / 5),
        side=STAR_RADIUS * math.sin(0.4 * math.pi),
        reach=STAR_RADIUS,
    ),
}
_RINGS = {
    size: Outline(covers=_ring(hole), top=1, bottom=1, side=1, reach=1)
    for size, hole in RING_HOLES.items()
}


def of(shape: str, size: str) -> Outline:
    """Returns the outline of a shape; only a ring's depends on its size."""
    return _RINGS[size] if shape == "ring" else _SOLIDS[shape]
