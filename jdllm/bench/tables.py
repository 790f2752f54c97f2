"""The output of a run: SGLang's table for people, and a line in a JSONL file for scripts."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jdllm import errors

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 50, 40, 10
Row = tuple[str, str]  # label, key of the result


def _latency_rows(name: str, key: str) -> tuple[Row, ...]:
    figures = ("Mean", "Median", "P90", "P95", "P99")
    return tuple((f"{figure} {name} (ms):", f"{figure.lower()}_{key}_ms") for figure in figures)


THROUGHPUTS: tuple[Row, ...] = (
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
)
DENOISING: tuple[Row, ...] = (
    ("TPF (tokens / NFE):", "tpf"),
    ("Mean TPF per request:", "mean_tpf"),
    ("Mean NFE per request:", "mean_nfe"),
    ("Mean blocks per request:", "mean_blocks"),
    ("NFE per block:", "nfe_per_block"),
    ("Decode forwards of the batch:", "forwards"),
    ("Tokens per forward of the batch:", "tokens_per_forward"),
    ("Padding share since start:", "padding_fraction"),
    ("Device idle share:", "device_idle_fraction"),
    ("Preemptions:", "preemptions"),
    ("Compiles during the run:", "jit_compiles"),
)
LATENCIES: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("End-to-End Latency", _latency_rows("E2E Latency", "e2e_latency")),
    ("Time to First Token", _latency_rows("TTFT", "ttft")),
    ("Time per Output Token (excl. 1st token)", _latency_rows("TPOT", "tpot")),
    ("Inter-Token Latency", (*_latency_rows("ITL", "itl"), ("Max ITL (ms):", "max_itl_ms"))),
    ("Inter-Block Latency", _latency_rows("IBL", "inter_block_latency")),
)


def say(text: str) -> None:
    """Writes one line to stdout at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def title(text: str) -> str:
    """Returns the line that begins or ends a table."""
    return f"{text:=^{WIDTH}}"


def rows(result: Mapping[str, Any], wanted: Sequence[Row]) -> list[str]:
    """Returns `label value` lines in SGLang's columns; n/a stands for "not measured"."""
    return [f"{label:<{LABEL_WIDTH}} {_text(key, result.get(key)):<{VALUE_WIDTH}}".rstrip()
            for label, key in wanted]  # fmt: skip


def sections(
    result: Mapping[str, Any], wanted: Sequence[tuple[str, Sequence[Row]]] = LATENCIES
) -> list[str]:
    """Returns groups of rows with titles; a group without any measured value is left out."""
    lines = []
    for name, group in wanted:
        if any(result.get(key) is not None for _, key in group):
            lines += [f"{name:-^{WIDTH}}", *rows(result, group)]
    return lines


def check_writable(path: str | None) -> None:
    """Raises a ConfigError if a result file cannot be written, before anything is measured."""
    if not path:
        return
    file = pathlib.Path(path)
    try:
        is_new = not os.path.lexists(file)  # a link to nothing stays
        with file.open("a"):
            pass
        if is_new:
            file.unlink()  # what is refused later leaves no empty file
    except OSError as error:
        raise errors.ConfigError(f"cannot write results to {path!r}: {error}") from error


def append(path: str | None, result: Mapping[str, Any]) -> None:
    """Appends one JSON line; does nothing without a path."""
    if path:
        with pathlib.Path(path).open("a") as file:
            file.write(json.dumps(result) + "\n")


def _text(key: str, value: Any) -> str:
    if value is None:
        return "n/a"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2%}" if key.endswith("_fraction") else f"{value:.2f}"
