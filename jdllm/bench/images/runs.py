"""Runs of an image load: warm-up, what a request takes alone, and the measured traffic."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from jdllm.bench import command_line, traffic
from jdllm.bench.images import load, stats, targets

POLL_S, COMPILE_LIMIT_S = 0.5, 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How requests arrive: Poisson with a finite rate, at most `max_concurrency` at a time."""

    request_rate: float = math.inf
    max_concurrency: int | None = 1
    seed: int = 42
    show_progress: bool = True

    def settings(self) -> dict[str, Any]:
        is_finite = math.isfinite(self.request_rate)
        return {
            "request_rate": self.request_rate if is_finite else "inf",  # JSON has no infinity
            "max_concurrency": self.max_concurrency,
        }


def warm_up(
    target: targets.Target,
    asks: Sequence[load.Ask],
    *,
    counts: Sequence[int],
    steps: int,
) -> None:
    """Sends short requests of each kind, so that its programs are compiled and have run.

    Each of `counts` is a number of requests that are sent at once: of the shortest prompts, of
    middle ones and of the longest, since their captions have programs of their own. Programs that
    are being compiled are waited for.
    """
    short = load.kinds(
        [dataclasses.replace(one, num_inference_steps=steps, slo_s=None) for one in asks]
    )
    texts = sorted({one.prompt for one in asks}, key=lambda text: (len(text), text))
    numbers = itertools.count(1)

    def send() -> None:
        for one, count in itertools.product(short, counts):
            for prompts in _windows(texts, count):
                # Another text each time: nothing of the load, and none of these, is kept yet.
                some = [
                    dataclasses.replace(one, prompt=f"{text} {next(numbers)}") for text in prompts
                ]
                _all_succeed(target, some, None)

    wait_for_programs(target)
    send()
    if wait_for_programs(target):
        send()


def _windows(texts: Sequence[str], count: int) -> list[list[str]]:
    """Returns `count` texts of each end and of the middle; few texts are repeated."""
    width = max(1, min(count, len(texts) // 3))
    starts = sorted({0, (len(texts) - width) // 2, len(texts) - width})
    return [[texts[start + i % width] for i in range(count)] for start in starts]


def wait_for_programs(target: targets.Target) -> bool:
    """Waits until no program is being compiled; returns whether there was any."""
    began_s, has_waited = time.monotonic(), False
    while left := target.state().get("num_waiting_compiles"):
        if time.monotonic() - began_s > COMPILE_LIMIT_S:
            raise command_line.BenchError(
                f"{left} programs have not been compiled after {COMPILE_LIMIT_S:.0f} s"
            )
        has_waited = True
        time.sleep(POLL_S)
    return has_waited


def with_slos(target: targets.Target, asks: Sequence[load.Ask], *, scale: float) -> list[load.Ask]:
    """Returns the requests with the time that their answers may take.

    It is `scale` times what a request of the same kind takes alone. (SGLang's tool estimates that
    from a short warm-up request, in proportion to pixels and steps; here it is measured.) A time
    that the load itself gives stays.
    """
    alone: dict[tuple[Any, ...], float] = {}
    for one in load.kinds(asks):
        (record,) = _all_succeed(target, [one], 1)
        alone[one.kind] = record.latency_s
    return [
        one if one.slo_s is not None else dataclasses.replace(one, slo_s=scale * alone[one.kind])
        for one in asks
    ]


def measure(target: targets.Target, asks: Sequence[load.Ask], how: Traffic) -> dict[str, Any]:
    """Sends the requests and returns their figures and the engine's; BenchError if all failed."""
    before = target.state()
    records, duration_s = traffic.send(
        target.send,
        asks,
        at_s=traffic.arrivals_s(len(asks), how.request_rate, how.seed),
        max_concurrency=how.max_concurrency,
        show_progress=how.show_progress,
    )
    after = target.state()
    failed = [record.error for record in records if record.error is not None]
    if len(failed) == len(records):
        raise command_line.BenchError(f"all {len(failed)} requests failed; the first: {failed[0]}")
    return {
        **how.settings(),
        **stats.summarize(records, duration_s),
        **stats.engine_figures(before, after),
        "first_error": failed[0] if failed else None,
    }


def _all_succeed(
    target: targets.Target, asks: Sequence[load.Ask], concurrency: int | None
) -> list[stats.Record]:
    if not asks:
        return []
    records, _ = traffic.send(
        target.send,
        asks,
        at_s=[0.0] * len(asks),
        max_concurrency=concurrency,
        show_progress=False,
    )
    error = next((record.error for record in records if record.error is not None), None)
    if error is not None:
        raise command_line.BenchError(f"the warm-up failed: {error}")
    return records
