"""How a compiled program's GPU time splits over the `jax.named_scope`s of the model's parts.

Runs a function under the JAX profiler and adds up the kernels of the trace. A kernel names its HLO
instruction; in the compiled text, the instruction's metadata holds the scope it was traced in.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

_METADATA = re.compile(r"%?([\w.\-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Kernel time in milliseconds and launches, per scope and per (scope, kernel)."""

    by_scope: dict[str, float]
    by_kernel: list[tuple[str, str, float, int]]  # scope, kernel, ms, launches; longest first
    launches: int
    busy_ms: float
    span_ms: float


def profile(
    run: Callable[[], None], compiled_text: str, scopes: Iterable[str], forwards: int
) -> Profile:
    """Runs `run`, which does `forwards` forwards, under the profiler; times are per forward."""
    scope_of = _scopes_of_instructions(compiled_text, tuple(scopes))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        events = [event for event in kernel_events(data)]
    time_of: dict[tuple[str, str], float] = collections.defaultdict(float)
    count_of: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, instruction, nanoseconds, _ in events:
        key = (scope_of.get(instruction, "other"), f"{instruction} {name}"[:70])
        key = (key[0], re.sub(r"[.\d]+ ", " ", key[1] + " ").strip())
        time_of[key] += nanoseconds
        count_of[key] += 1
    by_scope: dict[str, float] = collections.defaultdict(float)
    for (scope, _), nanoseconds in time_of.items():
        by_scope[scope] += nanoseconds / 1e6 / forwards
    starts = [start for *_, start in events]
    ends = [start + nanoseconds for _, _, nanoseconds, start in events]
    return Profile(
        by_scope=dict(by_scope),
        by_kernel=[
            (*key, value / 1e6 / forwards, round(count_of[key] / forwards))
            for key, value in sorted(time_of.items(), key=lambda item: item[1], reverse=True)
        ],
        launches=round(len(events) / forwards),
        busy_ms=sum(by_scope.values()),
        span_ms=(max(ends) - min(starts)) / 1e6 / forwards if events else 0.0,
    )


def kernel_events(data: Any) -> Iterable[tuple[str, str, float, float]]:
    """Yields (kernel, HLO instruction, duration, start) in ns from a `jax.profiler.ProfileData`."""
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key}
                instruction = str(stats.get("hlo_op", ""))
                yield event.name, instruction, event.duration_ns, event.start_ns


def _scopes_of_instructions(text: str, scopes: tuple[str, ...]) -> dict[str, str]:
    """Returns the innermost known scope of each instruction that has one."""
    found = {}
    for line in text.splitlines():
        if match := _METADATA.search(line):
            parts = [part for part in match[2].split("/") if part in scopes]
            if parts:
                found[match[1]] = parts[-1]
    return found
