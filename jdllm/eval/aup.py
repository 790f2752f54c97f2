"""AUP, accuracy under parallelism: one number for a sweep of accuracy against tokens per forward.

    python -m jdllm.eval.aup runs/sweep/sweep.csv
    python -m jdllm.eval.aup --best 74.98 1:74.02 9.11:73.09

The points of one model on one task are a curve of accuracy (percent) over tokens per forward (TPF);
AUP is the area under it, with less weight where accuracy is below the best of any method on that
task. So an AUP is comparable only beside the same best accuracy, which is always printed with it.

The definition is that of the d3LLM leaderboard (`AUP_leaderboard` of hao-ai-lab/d3LLM), with one
difference: it ends with an error if the most parallel point has lost more than `LARGEST_LOSS`, and
here such a point is left out like any other.
"""

from __future__ import annotations

import csv
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jdllm import errors
from jdllm.host import arguments

PROG = "python -m jdllm.eval.aup"

ALPHA = 3.0  # how fast the weight falls with the distance to the best accuracy
LARGEST_LOSS = 5.0  # percentage points below the least parallel point; more, and a point is out


class Point(NamedTuple):
    """One setting: tokens per forward, and accuracy in percent."""

    tpf: float
    accuracy: float


def aup(points: Iterable[Point], *, best: float | None = None, alpha: float = ALPHA) -> float:
    """Returns the area under the curve of some points, in percent times tokens per forward.

    `best` is the best accuracy of any method on the task, in percent; None takes that of the
    points. Raises ValueError without points, or if a number is not finite, not positive or more
    than 100 percent.
    """
    found = kept(points)
    best = max(point.accuracy for point in found) if best is None else best
    if not 0 < best <= 100:
        raise ValueError(f"{best=} must be above 0 and at most 100 percent")

    def weighted(accuracy: float) -> float:
        return accuracy * min(math.exp(-alpha * (1 - accuracy / best)), 1.0)

    area = found[0].tpf * found[0].accuracy
    for before, point in zip(found, found[1:]):
        mean = (weighted(before.accuracy) + weighted(point.accuracy)) / 2
        area += (point.tpf - before.tpf) * mean
    return area


def kept(points: Iterable[Point]) -> list[Point]:
    """Returns the points that count, the least parallel first."""
    found = sorted(points)
    for point in found:
        if not (0 < point.tpf < math.inf and 0 <= point.accuracy <= 100):
            raise ValueError(f"{point} is no positive TPF with an accuracy from 0 to 100 percent")
    if not found:
        raise ValueError("AUP needs a point")
    return [one for one in found if one.accuracy >= found[0].accuracy - LARGEST_LOSS]


def of_sweep(points: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns what a sweep prints of its AUP, None if fewer than two points have both figures."""
    found = [
        Point(results["tpf_mean"], 100 * results["accuracy"])
        for results in points.values()
        if results["tpf_mean"] and results["accuracy"] is not None
    ]
    if len(found) < 2 or not any(point.accuracy for point in found):
        return None
    return line(found, None)


def line(points: Sequence[Point], best: float | None) -> str:
    """Returns AUP and what it was computed with, as one line."""
    value = aup(points, best=best)
    if best is None:
        against = f"{max(point.accuracy for point in kept(points)):.2f} % of these points"
    else:
        against = f"{best:.2f} %"
    text = f"AUP: {value:.2f} (best accuracy {against}"
    left_out = len(points) - len(kept(points))
    return text + (f"; {left_out} points lose more than 5 %)" if left_out else ")")


def read_csv(path: str) -> list[Point]:
    """Returns the points of a `sweep.csv`; a row without both figures is a ConfigError."""
    try:
        rows = list(csv.DictReader(pathlib.Path(path).read_text().splitlines()))
        return [Point(float(row["tpf_mean"]), 100 * float(row["accuracy"])) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"{path} is no sweep.csv of jdllm eval with accuracy and tpf_mean in each row: {error}"
        ) from error


def parse_point(text: str) -> Point:
    """Returns the point of `TPF:ACCURACY`."""
    tpf, _, accuracy = text.partition(":")
    try:
        return Point(float(tpf), float(accuracy))
    except ValueError:
        raise errors.ConfigError(
            f"{text!r} is neither TPF:ACCURACY (accuracy in percent) nor a file"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a wrong command line or file."""
    parser = arguments.Parser(PROG, __doc__)
    parser.add_argument(
        "points", nargs="+", metavar="FILE|TPF:ACCURACY", help="a sweep.csv, or points in percent"
    )
    parser.add_argument(
        "--best",
        type=float,
        metavar="PERCENT",
        help="best accuracy of any method on the task (default: of these points)",
    )
    options = parser.parse(argv)
    try:
        points: list[Point] = []
        for text in options.points:
            is_file = pathlib.Path(text).exists() or ":" not in text
            points += read_csv(text) if is_file else [parse_point(text)]
        sys.stdout.write(line(points, options.best) + "\n")
    except (errors.ConfigError, ValueError) as error:
        arguments.report(PROG, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
