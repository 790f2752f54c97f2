"""Computes the figures of a run of pictures, and the lines and tables that people read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.eval import summary
from jdllm.tasks import registry

COLUMNS = (
    "accuracy", "accuracy_stderr", "invalid_rate", "nfe_mean", "images_per_s", "latency_p50_s",
    "latency_p95_s", "num_examples",
)  # fmt: skip


def summarize(
    task: registry.ImageTask,
    records: Sequence[Mapping[str, Any]],
    sessions: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Returns the figures of a run; `by_kind` counts the captions that state a kind of fact."""
    n = len(records)
    latencies = [record["latency"] for record in records]
    wall_s = sum(session["wall_time_s"] for session in sessions)
    timed = sum(session["num_examples"] for session in sessions)
    kinds = {}
    for kind in task.kinds:
        found = [record["kinds"][kind] for record in records if kind in record["kinds"]]
        kinds[kind] = {**share(found), "num_examples": len(found)}
    return {
        "num_examples": n,
        **share([record["correct"] for record in records]),
        "by_kind": kinds,
        "invalid_rate": sum(record["invalid"] for record in records) / n,
        "nfe_mean": sum(record["nfe"] for record in records) / n,
        "images_per_s": timed / wall_s if wall_s else None,
        "latency_p50_s": float(np.percentile(latencies, 50)),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "wall_time_s": wall_s,
        "num_sessions": len(sessions),
    }


def share(found: Sequence[bool]) -> dict[str, float | None]:
    """Returns the share of what is right and its standard error; None if there is too little."""
    n = len(found)
    accuracy = sum(found) / n if n else None
    stderr = None
    if accuracy is not None and n > 1:
        stderr = math.sqrt(accuracy * (1 - accuracy) / (n - 1))
    return {"accuracy": accuracy, "accuracy_stderr": stderr}


def harness_fields(
    task: registry.ImageTask, figures: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of lm-eval's results; those that only texts have are left out."""
    missing = dict.fromkeys(("tpf_mean", "output_tokens_per_s"))
    return summary.harness_fields(task, 0, {**missing, **figures}, results)


def lines(task: registry.ImageTask, results: Mapping[str, Any]) -> str:
    """Returns what a run prints."""
    found = [
        f"Accuracy: {_number(results['accuracy'])}",
        f"Invalid: {_number(results['invalid_rate'])}",
        f"Latency: {_number(results['wall_time_s'])} s",
        f"Throughput: {_number(results['images_per_s'])} images/s",
        f"NFE: {_number(results['nfe_mean'])} per image",
        f"Examples: {results['num_examples']}, accuracy {_percent(results)}",
    ]
    for kind in task.kinds:
        one = results["by_kind"][kind]
        if one["num_examples"]:
            found.append(f"  {kind:9} {_percent(one)}, stated by {one['num_examples']}")
    return "\n".join(found)


def sweep_csv(task: registry.ImageTask, name: str, points: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns one row per value of the swept option; a cell is empty if it was not measured."""
    rows = [",".join((name, *COLUMNS, *task.kinds))]
    for value, results in points.items():
        cells = [results[key] for key in COLUMNS]
        cells += [results["by_kind"][kind]["accuracy"] for kind in task.kinds]
        rows.append(",".join((value, *("" if cell is None else str(cell) for cell in cells))))
    return "\n".join(rows) + "\n"


def sweep_markdown(
    task: registry.ImageTask, name: str, points: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns the same points as a table."""
    head = [name, "accuracy", *task.kinds, "images/s", "p50 latency, s"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for value, results in points.items():
        kinds = [_percent(results["by_kind"][kind]) for kind in task.kinds]
        speeds = [_number(results["images_per_s"]), _number(results["latency_p50_s"])]
        rows.append(f"| {' | '.join([value, _percent(results), *kinds, *speeds])} |")
    return "\n".join(rows) + "\n"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _percent(one: Mapping[str, Any]) -> str:
    if one["accuracy"] is None:
        return "n/a"
    error = one["accuracy_stderr"]
    return f"{100 * one['accuracy']:.1f} %" + ("" if error is None else f" ± {100 * error:.1f} %")
