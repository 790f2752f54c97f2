"""The plot of a comparison: the same loads with step-level batching and with batches of one."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdllm.plots import style

if TYPE_CHECKING:
    from matplotlib import axes

Result = Mapping[str, Any]
BAR = 0.8  # of the room of a group of bars
ROOM = 1.3  # of the tallest value: numbers and a legend stand above it


def save(results: Sequence[Result], name: str) -> list[pathlib.Path]:
    """Writes the plot of some runs and returns its files.

    A run has `load`, `batching` and the figures of `bench.image_stats`. Left are images per second,
    then latencies of loads in a closed loop as bars, and, if there are several rates, latencies
    over the rate.
    """
    closed = [one for one in results if one["load_share"] is None]
    rates = [one for one in results if one["load_share"] is not None]
    with style.applied():
        drawn, found = style.panels(2 + bool(rates), title=_title(results))
        _bars(found[0], closed, ("output_throughput",))
        found[0].set_title("images/s")
        found[0].legend(loc="upper left", ncols=2)
        _bars(found[1], closed, ("latency_p50", "latency_p99"))
        found[1].set_title("latency in s (solid: median, light: p99)")
        if rates:
            _lines(found[2], rates)
            found[2].set_title("latency in s over arriving requests/s")
        return style.save(drawn, name)


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(one["batching"] for one in results))


def _bars(panel: axes.Axes, results: Sequence[Result], keys: Sequence[str]) -> None:
    """Draws a group of bars for each load; of two figures the larger stands behind the other."""
    names = _names(results)
    loads = list(dict.fromkeys(one["load"] for one in results))
    width = BAR / len(names)
    for i, name in enumerate(names):
        own = {one["load"]: one for one in results if one["batching"] == name}
        places = [
            place + (i - (len(names) - 1) / 2) * width
            for place, load in enumerate(loads)
            if load in own
        ]
        rows = [own[load] for load in loads if load in own]
        tallest = [row[keys[-1]] for row in rows]
        for depth, key in reversed(list(enumerate(keys))):
            panel.bar(
                places,
                [row[key] for row in rows],
                width=0.94 * width,
                color=style.COLOURS[i],
                alpha=0.35 if depth else 1.0,
                label=name if not depth else None,
            )
        for place, value in zip(places, tallest, strict=True):
            panel.annotate(
                f"{value:.2f}", (place, value), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=8, color=style.GRAY,
            )  # fmt: skip
    panel.set_xticks(range(len(loads)), loads)
    panel.set_xlim(-0.6, len(loads) - 0.4)
    panel.grid(visible=False, axis="x")
    panel.set_ylim(0, ROOM * max(one[keys[-1]] for one in results))


def _lines(panel: axes.Axes, results: Sequence[Result]) -> None:
    for i, name in enumerate(_names(results)):
        own = sorted(
            (one for one in results if one["batching"] == name), key=lambda one: one["load_share"]
        )
        rates = [one["request_rate"] for one in own]
        for key, line, label in (("latency_p50", "-", "median"), ("latency_p99", "--", "p99")):
            panel.plot(
                rates,
                [one[key] for one in own],
                line,
                marker=style.MARKERS[i],
                color=style.COLOURS[i],
                label=f"{name}, {label}",
            )
    panel.set_xlim(left=0)
    panel.set_ylim(0, ROOM * max(one["latency_p99"] for one in results))
    panel.legend(loc="upper left", ncols=2, fontsize=8)


def _title(results: Sequence[Result]) -> str:
    target = results[0].get("target") or {}
    parts = [str(target.get("model") or ""), str(target.get("device") or "")]
    return ", ".join(filter(None, parts)) or "images"
