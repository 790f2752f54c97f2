"""Where the shapes of a scene lie: drawn at random, until every law of a picture holds.

No shape touches another one or the border. Stated relations hold with a margin, so that nobody
has to guess: left, right, above and below mean that the distance in that direction is at least
`DOMINANCE` times the one across. Inside is a small shape within a large one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from jdllm.tasks.scenes import outlines
from jdllm.tasks.scenes.scene import Shape

# Radii in units of the shorter side; the ranges are far enough apart for a size word.
RADII = {"small": (0.094, 0.108), "medium": (0.155, 0.175), "large": (0.238, 0.252)}
INNER_RADIUS = (0.084, 0.092)
BORDER = 0.04
GAP = 0.06
DOMINANCE = 1.4
# Shapes that can hold another one, and how far from its middle a large one has room.
ROOM = {"circle": 1.0, "square": outlines.SQUARE_HALF, "ring": outlines.RING_HOLES["large"]}
INNER_GAP = 0.04
TRIES = 24

SIZES = tuple(RADII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A group before it is placed."""

    count: int
    shape: str
    colour: str


Relations = Sequence[tuple[int, str, int]]


def place(
    rng: random.Random, groups: Sequence[Wanted], relations: Relations, size: tuple[int, int]
) -> tuple[Shape, ...] | None:
    """Returns the shapes in the order of drawing, or None if the draws do not fit.

    All shapes of a group have the same size.
    """
    inner = {i for i, name, _ in relations if name == "inside"}
    outer = {j for _, name, j in relations if name == "inside"}
    # An inner shape comes last: it is drawn over the outer one.
    order = sorted(range(len(groups)), key=lambda i: i in inner)
    placed: list[Shape] = []
    for i in order:
        host = next((j for one, name, j in relations if one == i and name == "inside"), None)
        around = next((shape for shape in placed if shape.group == host), None)
        size_word = _size_word(rng, is_inner=i in inner, is_outer=i in outer, count=len(groups))
        for _ in range(groups[i].count):
            for _ in range(TRIES):
                shape = _draw(rng, groups[i], i, size_word, around, size)
                if shape is not None and _fits(shape, placed, relations):
                    placed.append(shape)
                    break
            else:
                return None
    return tuple(placed)


def _size_word(rng: random.Random, *, is_inner: bool, is_outer: bool, count: int) -> str:
    if is_inner:
        return "small"
    if is_outer:
        return "large"
    # A picture has room for few large shapes; the draws that do not fit would cost time.
    weights = ((1, 1, 1), (4, 4, 3), (5, 4, 1))[count - 1]
    return rng.choices(SIZES, weights)[0]


def _draw(
    rng: random.Random,
    group: Wanted,
    index: int,
    size_word: str,
    around: Shape | None,
    size: tuple[int, int],
) -> Shape | None:
    """Returns a shape at a random place inside the border, or inside the shape around it.

    None if that one is too small for the drawn radius.
    """
    outline = outlines.of(group.shape, size_word)
    if around is not None:
        radius = rng.uniform(*INNER_RADIUS)
        free = around.radius * ROOM[around.shape] - radius * outline.reach - INNER_GAP
        if free < 0:
            return None
        y = around.y + rng.uniform(-free, free) * 0.7  # in the disc: 0.7 is about 1 / sqrt(2)
        x = around.x + rng.uniform(-free, free) * 0.7
    else:
        radius = rng.uniform(*RADII[size_word])
        height, width = (side / min(size) for side in size)
        y = rng.uniform(BORDER + outline.top * radius, height - BORDER - outline.bottom * radius)
        x = rng.uniform(BORDER + outline.side * radius, width - BORDER - outline.side * radius)
    return Shape(
        shape=group.shape,
        colour=group.colour,
        size=size_word,
        y=y,
        x=x,
        radius=radius,
        group=index,
    )


def _fits(shape: Shape, placed: Sequence[Shape], relations: Relations) -> bool:
    for other in placed:
        names = [(i, name) for i, name, j in relations if {i, j} == {shape.group, other.group}]
        if any(name == "inside" for _, name in names):
            continue
        if not _are_apart(shape, other):
            return False
        for i, name in names:
            one, two = (shape, other) if i == shape.group else (other, shape)
            if not _holds(one, name, two):
                return False
    return True


def _are_apart(one: Shape, other: Shape) -> bool:
    """Returns whether the boxes or the surrounding circles leave a gap."""
    a, b = outlines.of(one.shape, one.size), outlines.of(other.shape, other.size)
    upper, lower = ((one, a), (other, b)) if one.y < other.y else ((other, b), (one, a))
    dy, dx = lower[0].y - upper[0].y, abs(one.x - other.x)
    sides = one.radius * a.side + other.radius * b.side + GAP
    if dx >= sides:
        return True
    if dy >= upper[0].radius * upper[1].bottom + lower[0].radius * lower[1].top + GAP:
        return True
    return dy * dy + dx * dx >= (one.radius * a.reach + other.radius * b.reach + GAP) ** 2


def _holds(one: Shape, name: str, other: Shape) -> bool:
    dy, dx = other.y - one.y, other.x - one.x
    match name:
        case "left of":
            return dx >= DOMINANCE * abs(dy)
        case "right of":
            return -dx >= DOMINANCE * abs(dy)
        case "above":
            return dy >= DOMINANCE * abs(dx)
        case "below":
            return -dy >= DOMINANCE * abs(dx)
    raise ValueError(f"unknown relation {name!r}")
