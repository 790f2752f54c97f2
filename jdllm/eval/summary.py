"""Computes the figures of a run from its records, and the lines that people read.

Quantities: NFE is the number of decode forwards that a request took part in. TPF is completion
tokens per NFE, once as the mean over requests and once token-weighted (all tokens over all NFE).
Output tokens per second are end to end, over the wall time of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.eval import aup
from jdllm.tasks import registry

# lm-eval's name of a figure -> (our name, whether more is better).
FIGURES = {
    "invalid_rate": ("invalid_rate", False),
    "tpf": ("tpf_mean", True),
    "nfe": ("nfe_mean", False),
    "output_tokens_per_s": ("output_tokens_per_s", True),
}


def summarize(
    records: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Returns the figures of a run; a figure that was not measured is None."""
    n = len(records)
    share = share_of(records, "correct")
    counted = [record for record in records if record["nfe"]]
    nfe = sum(record["nfe"] for record in counted)
    latencies = [record["latency"] for record in records]
    wall_s = sum(session["wall_time_s"] for session in sessions)
    timed_tokens = sum(session["completion_tokens"] for session in sessions)
    return {
        "num_examples": n,
        "accuracy": share,
        "accuracy_stderr": None
        if share is None or n < 2
        else math.sqrt(share * (1 - share) / (n - 1)),
        "invalid_rate": share_of(records, "invalid"),
        "tpf_mean": _mean([record["completion_tokens"] / record["nfe"] for record in counted]),
        "tpf_token_weighted": (
            sum(record["completion_tokens"] for record in counted) / nfe if nfe else None
        ),
        "nfe_mean": _mean([record["nfe"] for record in counted]),
        "nfe_total": nfe,
        "completion_tokens": sum(record["completion_tokens"] for record in records),
        "output_tokens_per_s": timed_tokens / wall_s if wall_s else None,
        "latency_p50_s": float(np.percentile(latencies, 50)) if n else None,
        "latency_p95_s": float(np.percentile(latencies, 95)) if n else None,
        "wall_time_s": wall_s,
        "num_sessions": len(sessions),
        "num_cut_by_length": sum(record["finish_reason"] == "length" for record in records),
    }


def share_of(records: Sequence[Mapping[str, Any]], verdict: str) -> float | None:
    """Returns the share of records with this verdict, None if nothing was judged."""
    judged = [record[verdict] for record in records]
    return None if None in judged or not judged else sum(judged) / len(judged)


def harness_fields(
    task: registry.Task | registry.ImageTask,
    num_shots: int,
    figures: Mapping[str, Any],
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the fields of lm-eval's results, so that its `make_table` prints a run.

    A figure that was not measured is left out. `versions` holds the task's beside the packages'.
    """
    shown = {task.metric: figures["accuracy"]}
    shown |= {name: figures[own] for name, (own, _) in FIGURES.items()}
    row: dict[str, Any] = {"alias": task.name}
    row |= {f"{name},none": value for name, value in shown.items() if value is not None}
    if figures["accuracy"] is not None:
        stderr = figures["accuracy_stderr"]
        row[f"{task.metric}_stderr,none"] = "N/A" if stderr is None else stderr
    better = {task.metric: True} | {name: is_better for name, (_, is_better) in FIGURES.items()}
    count = figures["num_examples"]
    return {
        "results": {task.name: row},
        "group_subtasks": {task.name: []},
        "configs": {
            task.name: {
                "task": task.name,
                "output_type": "generate_until",
                "num_fewshot": num_shots,
                "metadata": {"version": task.version},
            }
        },
        "versions": {**results["versions"], task.name: task.version},
        "n-shot": {task.name: num_shots},
        "higher_is_better": {task.name: better},
        "n-samples": {task.name: {"original": count, "effective": count}},
    }


def lines(results: Mapping[str, Any]) -> str:
    """Returns SGLang's four lines (Latency is the wall time of the run), then TPF and NFE."""
    return "\n".join(
        [
            f"Accuracy: {_number(results['accuracy'])}",
            f"Invalid: {_number(results['invalid_rate'])}",
            f"Latency: {_number(results['wall_time_s'])} s",
            f"Output throughput: {_number(results['output_tokens_per_s'])} token/s",
            f"TPF: {_number(results['tpf_mean'])} "
            f"(token-weighted {_number(results['tpf_token_weighted'])})",
            f"NFE: {_number(results['nfe_mean'])} per request",
            f"Examples: {results['num_examples']}, accuracy "
            f"{_percent(results['accuracy'])} ± {_percent(results['accuracy_stderr'])}",
        ]
    )


SWEEP_COLUMNS = (
    "accuracy", "accuracy_stderr", "invalid_rate", "tpf_mean", "tpf_token_weighted", "nfe_mean",
    "output_tokens_per_s", "latency_p50_s", "latency_p95_s", "num_examples",
)  # fmt: skip


def sweep_csv(name: str, points: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns one row per value of the swept option; a cell is empty if it was not measured."""
    rows = [",".join((name, *SWEEP_COLUMNS))]
    for value, results in points.items():
        cells = ("" if results[key] is None else str(results[key]) for key in SWEEP_COLUMNS)
        rows.append(",".join((value, *cells)))
    return "\n".join(rows) + "\n"


def sweep_markdown(name: str, points: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the same points as a table, accuracy beside each speed, and their AUP."""
    rows = [
        f"| {name} | accuracy | invalid | TPF | NFE | output token/s |",
        "|---|---|---|---|---|---|",
    ]
    for value, results in points.items():
        rows.append(
            f"| {value} | {_percent(results['accuracy'])} ± {_percent(results['accuracy_stderr'])} "
            f"| {_percent(results['invalid_rate'])} | {_number(results['tpf_mean'])} "
            f"| {_number(results['nfe_mean'])} | {_number(results['output_tokens_per_s'])} |"
        )
    area = aup.of_sweep(points)
    return "\n".join(rows if area is None else [*rows, "", area]) + "\n"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"
