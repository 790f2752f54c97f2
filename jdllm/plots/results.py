"""Plots of result files: one line per setting, of one file or of several side by side.

A kind of file is known by its fields, and says which panels it has. Rows come in any order; a row
without a figure has no point on its line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdllm import errors
from jdllm.plots import style

ROOM = 1.08  # of the largest value of a panel
Row = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]  # label -> points


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: `lines(rows)` are those of one file; `is_log2`: x doubles from tick to tick."""

    title: str
    x: str
    lines: Callable[[Sequence[Row]], Lines]
    is_log2: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of result file: rows with all `fields`, whose name stands in titles."""

    name: str
    fields: frozenset[str]
    panels: tuple[Panel, ...]


def _by_setting(key: str, *, setting: str, x: str, scale: float = 1.0) -> Any:
    """Returns `lines` with the figure `key` over `x`, a line for each value of `setting`."""

    def lines(rows: Sequence[Row]) -> Lines:
        found: Lines = {}
        for row in rows:
            point = _point(row.get(x), row.get(key), scale)
            if point:
                found.setdefault(f"{setting} {row.get(setting)}", []).append(point)
        return found

    return lines


def _figures(names: Mapping[str, str], *, x: str, scale: float = 1.0) -> Any:
    """Returns `lines` with a line for each figure of `names` (key -> label)."""

    def lines(rows: Sequence[Row]) -> Lines:
        points = {
            label: [_point(row.get(x), row.get(key), scale) for row in rows]
            for key, label in names.items()
        }
        return {label: [one for one in found if one] for label, found in points.items()}

    return lines


def _accuracies(rows: Sequence[Row]) -> Lines:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("accuracy@"))
    return _figures({key: key.partition("@")[2] for key in keys}, x="step", scale=100)(rows)


KINDS = (
    Kind(
        name="one_batch",
        fields=frozenset(["batch_size", "threshold", "output_throughput", "mean_decode_latency"]),
        panels=(
            Panel(
                title="output tokens/s",
                x="requests of the batch",
                lines=_by_setting("output_throughput", setting="threshold", x="batch_size"),
                is_log2=True,
            ),
            Panel(
                title="ms per forward (median)",
                x="requests of the batch",
                lines=_by_setting(
                    "median_decode_latency", setting="threshold", x="batch_size", scale=1e3
                ),
                is_log2=True,
            ),
        ),
    ),
    Kind(
        name="serving",
        fields=frozenset(["concurrency", "median_ttft_ms", "output_throughput", "backend"]),
        panels=(
            Panel(
                title="output tokens/s",
                x="requests at a time (mean)",
                lines=_figures({"output_throughput": "output"}, x="concurrency"),
            ),
            Panel(
                title="latency of a request in s",
                x="requests at a time (mean)",
                lines=_figures(
                    {"median_e2e_latency_ms": "median", "p99_e2e_latency_ms": "p99"},
                    x="concurrency",
                    scale=1e-3,
                ),
            ),
            Panel(
                title="time to the first block in ms",
                x="requests at a time (mean)",
                lines=_figures({"median_ttft_ms": "median", "p99_ttft_ms": "p99"}, x="concurrency"),
            ),
        ),
    ),
    Kind(
        name="training",
        fields=frozenset(["step", "seconds"]),
        panels=(
            Panel(
                title="loss",
                x="step",
                lines=_figures({"loss": "training", "heldout_loss": "held out"}, x="step"),
            ),
            Panel(title="accuracy in % (held out)", x="step", lines=_accuracies),
        ),
    ),
)


def save(files: Mapping[str, Sequence[Row]], name: str) -> list[pathlib.Path]:
    """Writes NAME.png and NAME.svg of the rows of some files (label -> rows); returns the paths.

    Raises ConfigError if the files are of no kind, or not all of one.
    """
    kind = kind_of(files)
    drawn_lines = [
        {
            _label(label, line, one_file=len(files) == 1): points
            for label, rows in files.items()
            for line, points in panel.lines(rows).items()
            if points
        }
        for panel in kind.panels
    ]
    used = [(panel, lines) for panel, lines in zip(kind.panels, drawn_lines) if lines]
    if not used:
        raise errors.ConfigError(f"{', '.join(files)}: no row has a figure to plot")
    with style.applied():
        drawn, axes = style.panels(len(used), title=f"{kind.name}: {', '.join(files)}")
        for place, (panel, lines) in zip(axes, used):
            for i, (label, points) in enumerate(lines.items()):
                xs, ys = zip(*sorted(points))
                place.plot(
                    xs,
                    ys,
                    color=style.COLOURS[i % len(style.COLOURS)],
                    marker=style.MARKERS[i % len(style.MARKERS)] if len(xs) <= 20 else None,
                    label=label,
                )
            place.set_title(panel.title)
            place.set_xlabel(panel.x)
            place.set_ylim(0, ROOM * max(y for found in lines.values() for _, y in found) or 1.0)
            if panel.is_log2:
                place.set_xscale("log", base=2)
                place.set_xticks(sorted({x for found in lines.values() for x, _ in found}))
                place.xaxis.set_major_formatter("{x:g}")
            if len(lines) > 1:
                place.legend(fontsize=8)
        return style.save(drawn, name)


def kind_of(files: Mapping[str, Sequence[Row]]) -> Kind:
    """Returns the one kind of all files; a file's first row decides."""
    found = {}
    for label, rows in files.items():
        kinds = [kind for kind in KINDS if rows and kind.fields <= rows[0].keys()]
        if not kinds:
            known = ", ".join(kind.name for kind in KINDS)
            raise errors.ConfigError(f"{label} holds no results of these kinds: {known}")
        found[label] = kinds[0]
    names = {kind.name for kind in found.values()}
    if len(names) > 1:
        raise errors.ConfigError(f"{', '.join(files)} are of several kinds: {', '.join(names)}")
    return next(iter(found.values()))


def read(path: str) -> list[Row]:
    """Returns the rows of a JSON-lines file; a line that is no object is a ConfigError."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise errors.ConfigError(f"cannot read {path} as JSON lines: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise errors.ConfigError(f"{path} has a line that is no JSON object")
    return rows


def _label(file: str, line: str, *, one_file: bool) -> str:
    return line if one_file else f"{file}: {line}"


def _point(x: Any, y: Any, scale: float) -> tuple[float, float] | None:
    for value in (x, y):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
    return float(x), float(y) * scale
