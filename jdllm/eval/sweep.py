"""Writes what a sweep leaves beside its runs: `sweep.csv`, `summary.md`, `sweep.png` and `.svg`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jdllm import errors
from jdllm.eval import store
from jdllm.plots import style, sweep
from jdllm.plots.sweep import Axes, Point

Points = Mapping[str, Mapping[str, Any]]  # value of the swept option -> results of its run
# What lies across a plot, in results: tokens per forward, or denoising steps of a picture.
TEXT = ("tpf_mean", "tokens per forward (TPF)", "output_tokens_per_s", "output tokens/s")
PICTURES = ("nfe_mean", "denoising steps", "images_per_s", "images/s")


def write(
    root: pathlib.Path, name: str, points: Points, *, csv: str, table: str, kind: tuple[str, ...]
) -> str:
    """Writes the files of the sweep of the option `name` and returns what to print.

    `kind` is TEXT or PICTURES. Without matplotlib, or if nothing can be drawn, there is no plot,
    and the text says why: the figures of a long run are never lost to it.
    """
    store.write_text(root / "sweep.csv", csv)
    store.write_text(root / "summary.md", table)
    return f"\n{table}{_plot(root, name, points, kind)}"


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raises for a value that a sweep of the option `name` has twice, however it is written.

    Its row would be measured once, or twice under two labels.
    """
    for place, value in enumerate(values):
        # 1 and 1.0 are one setting; True is none of them.
        equal = (one for one in values[:place] if one == value)
        if any(isinstance(one, bool) == isinstance(value, bool) for one in equal):
            raise errors.ConfigError(f"the sweep of {name} has the value {value!r} twice")


def labels(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, Points]:
    """Returns the swept option and value -> results, of `option=value` -> results."""
    name = next(iter(results)).partition("=")[0]
    return name, {label.partition("=")[2]: one for label, one in results.items()}


def _plot(root: pathlib.Path, name: str, points: Points, kind: tuple[str, ...]) -> str:
    x, x_label, speed, speed_label = kind
    drawn = [
        Point(value, one[x], one["accuracy"], one["accuracy_stderr"], one[speed] or None)
        for value, one in points.items()
        if one[x] is not None and one["accuracy"] is not None
    ]
    if not drawn:
        return ""
    config = next(iter(points.values()))["config"]
    title = f"{config['task']}, {pathlib.PurePath(config['model']).name}, by {name}"
    try:
        style.check_installed()
        paths = sweep.save(drawn, Axes(title, x_label, speed_label), str(root / "sweep"))
    except errors.ConfigError as error:
        return f"\nno plot: {error}\n"
    return "".join(f"\nwrote {path}" for path in paths) + "\n"
