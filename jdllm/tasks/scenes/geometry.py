"""Geometry of what a picture shows: connected regions, holes, and shapes by their moments.

The oracle of scenes is built on it. It knows nothing of how scenes are drawn.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int

Mask = Bool[np.ndarray, "height width"]
Labels = Int[np.ndarray, "height width"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """The moments of a shape without a hole, and how far from them it keeps its name."""

    compactness: float
    orders: tuple[float, float, float]
    tolerance: float


# By integration: a disc's are 1 and 0, a square's compactness is 3 / pi; the rest was integrated
# numerically. A star lies between a pentagram (0.73 and 0.89) and a fat one, whose inner corners
# are at half its radius (0.85 and 0.77). Blur takes from the orders, so tolerances reach about
# half of them. A pentagon or an oblong is none of the four.
IDEAL = {
    "circle": Ideal(compactness=1.0, orders=(0.0, 0.0, 0.0), tolerance=0.22),
    "square": Ideal(compactness=0.955, orders=(0.0, 0.429, 0.0), tolerance=0.28),
    "triangle": Ideal(compactness=0.827, orders=(0.659, 0.0, 0.0), tolerance=0.38),
    "star": Ideal(compactness=0.77, orders=(0.0, 0.0, 0.83), tolerance=0.45),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of a region about its centroid (y, x), in pixels; the rest has no unit.

    `compactness` is area squared over 2 pi times the polar moment of area: 1 for a disc, less for
    all else. `order` k is |sum of z^k| / sum of |z|^k with z = x + iy: how much the region looks
    the same when turned by 1/k of a turn. None depends on place, scale or angle.
    """

    y: float
    x: float
    area: float
    compactness: float
    orders: tuple[float, float, float]  # 3, 4, 5


def moments(weights: Float[np.ndarray, "height width"]) -> Moments:
    """Returns the moments of a region given as the covered share of each pixel."""
    area = float(weights.sum())
    ys = np.arange(weights.shape[0]) + 0.5
    xs = np.arange(weights.shape[1]) + 0.5
    y = float(weights.sum(axis=1) @ ys) / area
    x = float(weights.sum(axis=0) @ xs) / area
    z = (xs - x)[None, :] + 1j * (ys - y)[:, None]
    square = (z * z.conj()).real
    polar = float((weights * square).sum())
    power, radius = z * z, np.sqrt(square)
    orders = []
    for order in (3, 4, 5):
        power = power * z
        size = float((weights * radius**order).sum())
        orders.append(abs(complex((weights * power).sum())) / size if size else 0.0)
    # A pixel is a small square, not a point; 1/6 is its own polar moment.
    compactness = area * area / (2 * math.pi * (polar + area / 6))
    return Moments(y=y, x=x, area=area, compactness=compactness, orders=tuple(orders))


def solid_shape(found: Moments) -> str | None:
    """Returns the name of the nearest ideal shape without a hole, None if none is near."""
    features = (found.compactness, *found.orders)
    distances = {
        name: math.dist(features, (ideal.compactness, *ideal.orders))
        for name, ideal in IDEAL.items()
    }
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= IDEAL[nearest].tolerance else None


def components(mask: Mask, *, has_diagonals: bool) -> tuple[Labels, int]:
    """Returns the connected regions of a mask, numbered from 1 (0: outside), and their count.

    Pixels are neighbours by their sides, and with `has_diagonals` by their corners too. Runs of
    pixels in a row are joined with those that they touch in the row above (union-find).
    """
    height, width = mask.shape
    padded = np.zeros((height, width + 2), np.int8)
    padded[:, 1:-1] = mask
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    stops = np.nonzero(edges == -1)[1]
    reach = 1 if has_diagonals else 0
    row_keys = rows * (width + 2)
    above = row_keys - (width + 2)
    first = np.searchsorted(row_keys + stops, above + starts - reach, side="right")
    last = np.searchsorted(row_keys + starts, above + stops + reach, side="left")
    parents = list(range(len(rows)))

    def root(run: int) -> int:
        while parents[run] != run:
            parents[run] = parents[parents[run]]
            run = parents[run]
        return run

    for run, (begin, end) in enumerate(zip(first.tolist(), last.tolist())):
        for other in range(begin, end):
            parents[root(run)] = root(other)
    roots = np.array([root(run) for run in range(len(rows))], np.int64)
    names, numbers = np.unique(roots, return_inverse=True)
    changes = np.zeros((height, width + 1), np.int32)
    changes[rows, starts] += (numbers + 1).astype(np.int32)
    changes[rows, stops] -= (numbers + 1).astype(np.int32)
    return np.cumsum(changes, axis=1)[:, :-1], len(names)


def holes(mask: Mask) -> list[Mask]:
    """Returns the regions outside a mask that it shuts off from the border."""
    padded = np.pad(~mask, 1, constant_values=True)
    labels, count = components(padded, has_diagonals=False)
    inner = labels[1:-1, 1:-1]
    return [inner == i for i in range(1, count + 1) if i != labels[0, 0]]


def grown(mask: Mask) -> Mask:
    """Returns a mask with all neighbours of its pixels, corners included."""
    padded = np.pad(mask, 1)
    tall = padded[:-2] | padded[1:-1] | padded[2:]
    return tall[:, :-2] | tall[:, 1:-1] | tall[:, 2:]


def strongest_near(
    values: Float[np.ndarray, "height width"],
) -> Float[np.ndarray, "height width"]:
    """Returns the greatest of each value and its eight neighbours."""
    padded = np.pad(values, 1, mode="edge")
    tall = np.maximum(np.maximum(padded[:-2], padded[1:-1]), padded[2:])
    return np.maximum(np.maximum(tall[:, :-2], tall[:, 1:-1]), tall[:, 2:])


def shrunk(mask: Mask) -> Mask:
    """Returns a mask without the pixels that have a neighbour outside it."""
    return ~grown(~mask)
