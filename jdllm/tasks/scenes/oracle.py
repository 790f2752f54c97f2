"""Judges pictures: does a picture show what its caption states?

The facts are plain data; a generated scene turns itself into them. The picture is read back by
`reading`. This module and what it imports share no code and no number with the generator
(`jdllm.tasks.scenes`), so a mistake there cannot hide here.

A picture is right when it shows exactly the stated number of shapes, and they can be matched with
the stated things so that every colour, shape and size word fits, and every relation holds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from jdllm.tasks.scenes import reading as scene_reading
from jdllm.tasks.scenes.reading import Reading, Seen

# "left of" holds when the distance across the page is at least this share of the picture's
# shorter side, and at least this many times the distance down the page.
LEAST_DISTANCE, LEAST_RATIO = 0.05, 0.85
OPPOSITES = {"right of": "left of", "below": "above"}
RELATIONS = ("left of", "right of", "above", "below", "inside")
Word = Literal["shape", "colour", "size"]
KINDS = ("count", "shape", "colour", "size", "relation", "ground")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """`count` shapes that the caption names together; None is what it does not state."""

    count: int = 1
    shape: str
    colour: str | None = None
    size: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """Each shape of thing `subject` stands in the relation to each of thing `object`."""

    subject: int
    name: str
    object: int

    def __post_init__(self) -> None:
        if self.name not in RELATIONS:
            raise ValueError(f"relation {self.name!r} must be one of {', '.join(RELATIONS)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a caption states."""

    things: tuple[Thing, ...]
    relations: tuple[Relation, ...] = ()
    ground: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`wrong` says what does not fit, one sentence each; it is empty for a right picture.

    Its words begin with the kind of fact: ground, count, things (colour, shape or size) or
    relations.
    """

    wrong: tuple[str, ...]
    reading: Reading

    @property
    def is_right(self) -> bool:
        return not self.wrong


def check(facts: Facts, picture: UInt8[np.ndarray, "height width 3"]) -> Verdict:
    """Returns whether a picture shows the facts; ValueError for what is no RGB picture."""
    reading = scene_reading.read(picture)
    wrong = []
    if facts.ground is not None and reading.ground != facts.ground:
        wrong.append(f"ground: {reading.ground}, not {facts.ground}")
    wanted = [i for i, thing in enumerate(facts.things) for _ in range(thing.count)]
    if len(reading.shapes) != len(wanted):
        wrong.append(f"count: {len(reading.shapes)} shapes, not {len(wanted)}")
        return Verdict(wrong=tuple(wrong), reading=reading)
    fitting = _matchings(facts, reading, wanted, ("shape", "colour", "size"))
    if not fitting:
        wrong.append("things: " + ", ".join(_described(seen) for seen in reading.shapes))
    elif not any(_all_hold(facts, wanted, order, reading) for order in fitting):
        told = "; ".join(f"{r.subject} {r.name} {r.object}" for r in facts.relations)
        wrong.append(f"relations: the picture does not show {told}")
    return Verdict(wrong=tuple(wrong), reading=reading)


def by_kind(facts: Facts, reading: Reading) -> dict[str, bool]:
    """Returns for each kind of fact that the caption states whether the picture shows it.

    Each kind is judged by itself: colours may be right on wrong shapes. Only "relation" needs to
    know the shapes and colours, since these name what it relates. With another number of shapes
    than stated, all but "count" and "ground" are wrong.
    """
    things = facts.things
    wanted = [i for i, thing in enumerate(things) for _ in range(thing.count)]
    has_count = len(reading.shapes) == len(wanted)

    def fitting(*words: Word) -> list[tuple[Seen, ...]]:
        return _matchings(facts, reading, wanted, words) if has_count else []

    found = {"count": has_count, "shape": bool(fitting("shape"))}
    if any(thing.colour is not None for thing in things):
        found["colour"] = bool(fitting("colour"))
    if any(thing.size is not None for thing in things):
        found["size"] = bool(fitting("size"))
    if facts.relations:
        found["relation"] = any(
            _all_hold(facts, wanted, order, reading) for order in fitting("shape", "colour")
        )
    if facts.ground is not None:
        found["ground"] = reading.ground == facts.ground
    return found


def _matchings(
    facts: Facts, reading: Reading, wanted: Sequence[int], words: Sequence[Word]
) -> list[tuple[Seen, ...]]:
    """Returns the orders of the shapes seen in which these words of all things fit.

    Things may look alike, so every way to match them counts.
    """
    return [
        order
        for order in itertools.permutations(reading.shapes)
        if all(_fits(seen, facts.things[i], words) for seen, i in zip(order, wanted))
    ]


def _fits(seen: Seen, thing: Thing, words: Sequence[Word]) -> bool:
    told = {"shape": thing.shape, "colour": thing.colour, "size": thing.size}
    shown = {"shape": seen.shape, "colour": seen.colour, "size": seen.size}
    return all(told[word] in (None, shown[word]) for word in words)


def _described(seen: Seen) -> str:
    return f"{seen.size} {seen.colour or 'unnamed'} {seen.shape or 'blot'}"


def _all_hold(facts: Facts, wanted: Sequence[int], order: Sequence[Seen], reading: Reading) -> bool:
    def of(thing: int) -> list[Seen]:
        return [seen for seen, i in zip(order, wanted) if i == thing]

    return all(
        _holds(relation.name, subject, other, reading)
        for relation in facts.relations
        for subject in of(relation.subject)
        for other in of(relation.object)
    )


def _holds(name: str, subject: Seen, other: Seen, reading: Reading) -> bool:
    if name in OPPOSITES:
        return _holds(OPPOSITES[name], other, subject, reading)
    is_inside = subject.inside is not None and reading.shapes[subject.inside] is other
    if name == "inside":
        return is_inside
    if is_inside or (other.inside is not None and reading.shapes[other.inside] is subject):
        return False
    down, across = other.y - subject.y, other.x - subject.x
    along, aside = (across, down) if name == "left of" else (down, across)
    least = LEAST_DISTANCE * min(reading.height, reading.width)
    return along >= max(least, LEAST_RATIO * abs(aside))
