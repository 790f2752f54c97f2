"""A scene: what is drawn, and which of its facts the caption states."""

from __future__ import annotations

import dataclasses

from jdllm.tasks.scenes import oracle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One drawn shape; lengths are in units of the picture's shorter side.

    (y, x) is the centroid, from the top left corner.
    """

    shape: str
    colour: str
    size: str
    y: float
    x: float
    radius: float
    group: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One to three equal shapes that the caption names together."""

    count: int
    shape: str
    colour: str
    size: str
    states_colour: bool
    states_size: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One scene and its caption.

    `size` is (height, width) in pixels; `shapes` are in the order of drawing, `relations` (group,
    name, group) those that the caption states, `phrasings` its pairs of wordings, `combinations`
    (colour, shape, role) those of its groups.
    """

    id: str
    size: tuple[int, int]
    caption: str
    ground: str
    states_ground: bool
    shapes: tuple[Shape, ...]
    groups: tuple[Group, ...]
    relations: tuple[tuple[int, str, int], ...]
    phrasings: tuple[tuple[str, str, str], ...]
    combinations: tuple[tuple[str, str, str], ...]

    def facts(self) -> oracle.Facts:
        """Returns what the caption states, for the oracle."""
        return oracle.Facts(
            things=tuple(
                oracle.Thing(
                    count=group.count,
                    shape=group.shape,
                    colour=group.colour if group.states_colour else None,
                    size=group.size if group.states_size else None,
                )
                for group in self.groups
            ),
            relations=tuple(oracle.Relation(*relation) for relation in self.relations),
            ground=self.ground if self.states_ground else None,
        )
