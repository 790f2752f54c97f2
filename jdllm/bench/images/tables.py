"""The output of image benchmarks: SGLang's table of one run, or one row for each of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdllm.bench import tables
from jdllm.bench.images import stats

HEAD: tuple[tables.Row, ...] = (
    ("Task:", "task"),
    ("Model:", "model"),
    ("Dataset:", "dataset"),
    ("Traffic request rate:", "request_rate"),
    ("Max request concurrency:", "max_concurrency"),
    ("Benchmark duration (s):", "duration"),
    ("Successful requests:", "successful"),
    ("Completed outputs:", "completed_outputs"),
    ("Request throughput (req/s):", "throughput_qps"),
    ("Output throughput (images/s):", "output_throughput"),
    ("Denoising steps per second:", "step_throughput"),
    ("Concurrency:", "concurrency"),
)
ENGINE: tuple[tables.Row, ...] = (
    ("Images per denoising launch:", "images_per_launch"),
    ("Share of merged steps:", "merged_step_fraction"),
    ("Device idle share:", "device_idle_fraction"),
    ("Compiles during the run:", "jit_compiles"),
    ("Of these at first use:", "first_use_compiles"),
    ("Start-up of the engine (s):", "startup_time_s"),
    ("Peak Memory Max (MB):", "peak_memory_mb_max"),
    ("Peak Memory Mean (MB):", "peak_memory_mb_mean"),
    ("Peak Memory Median (MB):", "peak_memory_mb_median"),
)
SLO: tuple[tables.Row, ...] = (
    ("SLO Attainment Rate:", "slo_attainment_rate"),
    ("SLO Met (Success):", "slo_met_success"),
    ("SLO Scale:", "slo_scale"),
)


def _seconds(label: str, key: str) -> tuple[tables.Row, ...]:
    figures = (("Mean", "mean"), ("Median", "median"))
    figures += tuple((f"P{q}", f"p{q}") for q in stats.PERCENTILES[1:])
    return tuple((f"{name} {label} (s):", f"{key}_{figure}") for name, figure in figures)


def one_run(result: Mapping[str, Any]) -> str:
    """Returns SGLang's table of a run; n/a stands for "not measured"."""
    total = result["completed_requests"] + result["failed_requests"]
    limit = result["max_concurrency"] or "not set"
    shown = {
        **result,
        "successful": f"{result['completed_requests']}/{total}",
        "max_concurrency": limit,
    }
    groups: list[tuple[str, Sequence[tables.Row]]] = [("Latency", _seconds("Latency", "latency"))]
    groups += [
        (f"{phase.capitalize()} time", _seconds(phase.capitalize(), phase)[:1])
        for phase in stats.PHASES
    ]
    groups += [
        ("Engine", ENGINE),
        ("SLO", SLO if result["slo_attainment_rate"] is not None else ()),
    ]
    lines = ["", tables.title(" Serving Benchmark Result "), *tables.rows(shown, HEAD)]
    lines += tables.sections(shown, groups)
    return "\n".join([*lines, tables.title("")])


# Column -> (key, factor, decimals) of a table of several runs.
COLUMNS: dict[str, tuple[str, float, int]] = {
    "req/s": ("throughput_qps", 1, 2),
    "images/s": ("output_throughput", 1, 2),
    "mean s": ("latency_mean", 1, 2),
    "p50 s": ("latency_p50", 1, 2),
    "p90 s": ("latency_p90", 1, 2),
    "p99 s": ("latency_p99", 1, 2),
    "SLO met %": ("slo_attainment_rate", 100, 1),
    "merged %": ("merged_step_fraction", 100, 1),
    "idle %": ("device_idle_fraction", 100, 1),
    "peak GB": ("peak_memory_mb_max", 1e-3, 1),
    "compiles": ("jit_compiles", 1, 0),
    "failed": ("failed_requests", 1, 0),
}


def several_runs(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table with a row for each run; columns without any value are left out."""
    columns = {
        name: how
        for name, how in COLUMNS.items()
        if any(row.get(how[0]) is not None for row in results)
    }
    cells = [["load", "batching", *columns]]
    for row in results:
        values = (_cell(row.get(key), factor, digits) for key, factor, digits in columns.values())
        cells.append([row["load"], row["batching"], *values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(row, widths) for row in cells]
    rule = "|".join("-" * (width + 1) + (":" if i > 1 else "-") for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _cell(value: Any, factor: float, digits: int) -> str:
    return "n/a" if value is None else f"{factor * value:.{digits}f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
