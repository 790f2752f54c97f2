"""Scenes of coloured shapes with captions, generated from a seed: a picture's text and its facts.

A scene has one to three shapes (circle, square, triangle, star, ring; eight colours; three sizes)
on a ground of a colour that no shape has, and up to two relations between them. Its caption states
the shapes and some of: their colours and sizes, the ground, relations (`left of`, `right of`,
`above`, `below`, `inside`). What it leaves out is drawn at random; what it states holds.

`generate(index, split=..., seed=..., size=...)` is a pure function. The splits differ in two ways:
  combinations  a (colour, shape, role) with `splits.is_held_out_combination` never occurs in
                training, and every test scene has one whose colour its caption states. A role is
                a shape's place in a stated relation: each of the five, `around` for the outer
                shape of `inside`, and `unrelated` for a shape without a stated relation. The
                wording does not count: "a left of b" is "b right of a", so it also holds out
                the role of b;
  phrasings     a pair of wordings with `splits.is_held_out_phrasing` never occurs in training, and
                every test scene has one. The families of pairs are opener with noun, colour,
                relation, frame or ground; size word with noun; number with noun; and ground with
                its colour. So training has shown every single word and frame, but not these
                together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from jdllm.tasks.scenes import captions, drawing, layout, splits
from jdllm.tasks.scenes.captions import Relations
from jdllm.tasks.scenes.scene import Group, Scene
from jdllm.tasks.splits import Split

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
GROUNDS = (*COLOURS, "white", "gray", "black")
SHAPES = ("circle", "square", "triangle", "star", "ring")
BESIDE = ("left of", "right of", "above", "below")
CAPTION_TRIES = 40

STATES_SIZE, STATES_GROUND, HIDES_COLOUR = 0.35, 0.45, 0.08
INSIDE = 0.25  # share of related pairs


def generate(index: int, *, split: Split, seed: int = 0, size: tuple[int, int] = (64, 64)) -> Scene:
    """Returns scene `index` of a split; the same arguments give the same scene.

    `size` is (height, width) in pixels.
    """
    if split not in ("train", "test"):
        raise ValueError(f"{split=} must be 'train' or 'test'")
    drawing.check_size(size)
    rng = random.Random(f"{seed}/{split}/{index}/{size[0]}x{size[1]}")
    counts, relations = _plan(rng)
    while True:
        wanted = _groups(rng, counts, relations)
        combinations = _combinations(wanted, relations)
        states_colour = _states_colour(rng, wanted)
        if not _allows_combinations(split, combinations, states_colour):
            continue
        shapes = layout.place(rng, wanted, relations, size)
        if shapes is None:
            continue
        groups = tuple(
            Group(
                count=group.count,
                shape=group.shape,
                colour=group.colour,
                size=next(shape.size for shape in shapes if shape.group == i),
                states_colour=states_colour[i],
                states_size=rng.random() < STATES_SIZE,
            )
            for i, group in enumerate(wanted)
        )
        ground = rng.choice([name for name in GROUNDS if all(name != g.colour for g in wanted)])
        states_ground = rng.random() < STATES_GROUND
        told = _caption(rng, split, groups, relations, ground if states_ground else None)
        if told is not None:
            break
    return Scene(
        id=f"{split}-{seed}-{index}",
        size=size,
        caption=told.text,
        ground=ground,
        states_ground=states_ground,
        shapes=shapes,
        groups=groups,
        relations=tuple(relations),
        phrasings=tuple(told.pairs),
        combinations=tuple(row for rows in combinations for row in rows),
    )


def scenes(
    split: Split, *, seed: int = 0, start: int = 0, size: tuple[int, int] = (64, 64)
) -> Iterator[Scene]:
    """Yields scenes `start`, `start + 1`, ... of a split, without end."""
    index = start
    while True:
        yield generate(index, split=split, seed=seed, size=size)
        index += 1


def _plan(rng: random.Random) -> tuple[tuple[int, ...], Relations]:
    """Draws the counts of the groups and the relations that the caption states.

    They are drawn once, whatever is drawn again later: laws that are harder to meet for many
    shapes must not make such scenes rare.
    """
    counts = rng.choices(
        ((1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1)), (20, 5, 3, 42, 5, 5, 20)
    )[0]
    return counts, _relations(rng, counts)


def _groups(rng: random.Random, counts: Sequence[int], relations: Relations) -> list[layout.Wanted]:
    while True:
        groups = [
            layout.Wanted(count=count, shape=rng.choice(SHAPES), colour=rng.choice(COLOURS))
            for count in counts
        ]
        has_room = all(
            groups[j].shape in layout.ROOM and groups[i].colour != groups[j].colour
            for i, name, j in relations
            if name == "inside"
        )
        if has_room and len({(group.shape, group.colour) for group in groups}) == len(groups):
            return groups


def _relations(rng: random.Random, counts: Sequence[int]) -> tuple[tuple[int, str, int], ...]:
    """Draws no relation, one of group 0 to group 1, or a second one with group 2."""
    if len(counts) == 1 or rng.random() < 0.2:
        return ()
    can_nest = max(counts) == 1
    name = "inside" if can_nest and rng.random() < INSIDE else rng.choice(BESIDE)
    first = (0, name, 1)
    if len(counts) == 2 or rng.random() < 0.3:
        return (first,)
    # The outer shape can have a neighbour; to say it of the inner one would be odd.
    if name == "inside" or rng.random() < 0.5:
        return (first, (2, rng.choice(BESIDE), 1))
    return (first, (0, rng.choice(BESIDE), 2))


def _combinations(
    groups: Sequence[layout.Wanted], relations: Relations
) -> list[list[tuple[str, str, str]]]:
    """Returns the (colour, shape, role) rows of each group."""
    roles: list[list[str]] = [[] for _ in groups]
    for i, name, j in relations:
        roles[i].append(name)
        roles[j].append(splits.INVERSES[name])
    return [
        [(group.colour, group.shape, role) for role in names or [splits.UNRELATED]]
        for group, names in zip(groups, roles)
    ]


def _states_colour(rng: random.Random, groups: Sequence[layout.Wanted]) -> list[bool]:
    """Draws whose colour is told; only a shape that no other group has can do without."""
    are_distinct = len({group.shape for group in groups}) == len(groups)
    return [not are_distinct or rng.random() >= HIDES_COLOUR for _ in groups]


def _allows_combinations(
    split: Split, combinations: list[list[tuple[str, str, str]]], states_colour: Sequence[bool]
) -> bool:
    held_out = [any(splits.is_held_out_combination(*row) for row in rows) for rows in combinations]
    if split == "train":
        return not any(held_out)
    return any(is_new and is_told for is_new, is_told in zip(held_out, states_colour))


def _caption(
    rng: random.Random,
    split: Split,
    groups: Sequence[Group],
    relations: Relations,
    ground: str | None,
) -> captions.Caption | None:
    """Draws captions until one suits the split; None if none does."""
    for _ in range(CAPTION_TRIES):
        told = captions.Caption(rng, groups, relations, ground)
        if any(splits.is_held_out_phrasing(*pair) for pair in told.pairs) == (split == "test"):
            return told
    return None
