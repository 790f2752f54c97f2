"""Turns the records of image requests into one flat dict of figures.

Names are those of SGLang's image benchmark where it has them: latencies are seconds, throughput is
in requests (`throughput_qps`) and in images (`output_throughput`) per second, memory is MB. None
means "not measured".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
PHASES = ("queue", "encode", "denoise", "decode")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request from start to end; `error` says why it failed, and is None if it did not.

    `times` has for each image the seconds of the `PHASES`, as far as the answer tells them.
    """

    start_s: float
    end_s: float
    images: int = 0
    steps: int = 0
    times: tuple[Mapping[str, float], ...] = ()
    peak_memory_mb: float | None = None
    slo_s: float | None = None
    error: str | None = None

    @property
    def latency_s(self) -> float:
        """Seconds from sending the request to the end of its answer."""
        return self.end_s - self.start_s

    @property
    def meets_slo(self) -> bool:
        return self.error is None and (self.slo_s is None or self.latency_s <= self.slo_s)


def summarize(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """Returns the figures of a run; latencies and times are those of requests that succeeded."""
    done = [record for record in records if record.error is None]
    images = sum(record.images for record in done)
    latencies = [record.latency_s for record in done]
    with_slo = [record for record in records if record.slo_s is not None]
    met = sum(record.meets_slo for record in with_slo)
    memory = [r.peak_memory_mb for r in done if r.peak_memory_mb is not None]
    found = {
        "duration": duration_s,
        "completed_requests": len(done),
        "failed_requests": len(records) - len(done),
        "completed_outputs": images,
        "throughput_qps": len(done) / duration_s,
        "output_throughput": images / duration_s,
        "step_throughput": sum(record.steps for record in done) / duration_s,
        "concurrency": sum(latencies) / duration_s,
        **spread("latency", latencies),
        "slo_attainment_rate": met / len(with_slo) if with_slo else None,
        "slo_met_success": met if with_slo else None,
        "peak_memory_mb_max": max(memory, default=None),
        "peak_memory_mb_mean": float(np.mean(memory)) if memory else None,
        "peak_memory_mb_median": float(np.median(memory)) if memory else None,
    }
    for phase in PHASES:
        seconds = [times[phase] for record in done for times in record.times if phase in times]
        found |= spread(phase, seconds)
    return found


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Returns mean, median and percentiles under SGLang's keys, such as `latency_p99`."""
    values = np.asarray(seconds, np.float64)
    found = {
        f"{name}_p{q}": float(np.percentile(values, q)) if values.size else None
        for q in PERCENTILES
    }
    mean = float(values.mean()) if values.size else None
    return {f"{name}_mean": mean, f"{name}_median": found[f"{name}_p50"], **found}


def engine_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the engine's counters (`ImageStats`) say about the time between two reads.

    A step is one image's; `merged_step_fraction` is the share of steps whose launch had several
    images. A figure is None if the engine does not count it. The peak of memory is that of the
    process so far.
    """

    def grown(name: str) -> Any:
        known = name in before and name in after
        return after[name] - before[name] if known else None

    def ratio(part: Any, whole: Any) -> float | None:
        return part / whole if part is not None and whole else None

    steps, launches = grown("denoising_steps_total"), grown("denoise_launches_total")
    found = {
        "denoising_steps": steps,
        "denoise_launches": launches,
        "images_per_launch": ratio(steps, launches),
        "merged_step_fraction": ratio(grown("merged_steps_total"), steps),
        "device_idle_fraction": ratio(
            grown("device_idle_seconds_total"), grown("device_seconds_total")
        ),
        "jit_compiles": grown("jit_compiles_total"),
        "first_use_compiles": grown("first_use_compiles_total"),
        "startup_time_s": after.get("startup_time_seconds"),
    }
    peak_gb = after.get("peak_memory_usage_gb")  # 0 where it is not counted
    return found | ({"peak_memory_mb_max": 1000 * peak_gb} if peak_gb else {})
