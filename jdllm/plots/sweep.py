"""The plot of a sweep: what accuracy each speed costs."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdllm.plots import style

if TYPE_CHECKING:
    from matplotlib import axes

ROOM = 1.15  # of the largest speed


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One value of the swept option; accuracy and its standard error are shares of 1."""

    label: str
    x: float
    accuracy: float
    stderr: float | None
    speed: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """What the numbers are: `x` and `speed` with their units, `title` of the whole figure."""

    title: str
    x: str
    speed: str


def save(points: Sequence[Point], axes_: Axes, name: str) -> list[pathlib.Path]:
    """Writes NAME.png and NAME.svg: accuracy with its error over `x`, and speed over `x`.

    Raises ConfigError if matplotlib is missing or a file cannot be written.
    """
    found = sorted(points, key=lambda point: point.x)
    timed = [point for point in found if point.speed is not None]
    with style.applied():
        drawn, panels = style.panels(1 + bool(timed), title=axes_.title)
        left = panels[0]
        left.errorbar(
            [point.x for point in found],
            [100 * point.accuracy for point in found],
            [100 * (point.stderr or 0.0) for point in found],
            color=style.COLOURS[0],
            marker=style.MARKERS[0],
            capsize=3,
            elinewidth=1.0,
        )
        left.set_title("accuracy in % (± standard error)")
        _name_points(left, found, [100 * point.accuracy for point in found])
        if timed:
            speeds = [point.speed for point in timed if point.speed is not None]
            right = panels[1]
            right.plot(
                [point.x for point in timed],
                speeds,
                color=style.COLOURS[1],
                marker=style.MARKERS[1],
            )
            right.set_title(axes_.speed)
            right.set_ylim(0, ROOM * max(speeds))
            _name_points(right, timed, speeds)
        for panel in panels:
            panel.set_xlabel(axes_.x)
            panel.margins(x=0.12)
        return style.save(drawn, name)


def _name_points(panel: axes.Axes, points: Sequence[Point], heights: Sequence[float]) -> None:
    # To the right above and to the left below, in turn: neighbours may lie close together.
    for i, (point, height) in enumerate(zip(points, heights, strict=True)):
        panel.annotate(
            point.label, (point.x, height), xytext=(-5, -11) if i % 2 else (5, 5),
            ha="right" if i % 2 else "left", textcoords="offset points", fontsize=8,
            color=style.GRAY,
        )  # fmt: skip
