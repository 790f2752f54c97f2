"""Turns the records of requests into one flat dict of figures.

`serving`, `one_batch` and `offline_throughput` all take their statistics from here. Names and
definitions are SGLang's where it has them. For diffusion models there are also NFE (decode
forwards that a request took part in), TPF (tokens per forward of the request), blocks, and the
time between blocks. Times are seconds of one monotonic clock, figures in `_ms` are milliseconds,
throughputs are per second; percentiles are numpy's (linear interpolation); None means "not
measured".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Unit = Literal["tokens", "blocks", "nfe"]
PERCENTILES = (90, 95, 99)
# Blocks of one launch of the device reach the client within less than this of one another.
TOGETHER_S = 2e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One piece of an answer: when it arrived, and the totals of its request up to it."""

    at_s: float
    tokens: int
    blocks: int | None = None
    nfe: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request from start to end; `error` says why it failed, and is None if it did not.

    `nfe`, `blocks` and `cached_tokens` are None if the server does not send them.
    """

    start_s: float
    end_s: float
    prompt_tokens: int
    completion_tokens: int = 0
    commits: tuple[Commit, ...] = ()
    nfe: int | None = None
    blocks: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def latency_s(self) -> float:
        """Seconds from sending the request to the end of its answer."""
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, which is the first committed block."""
        return self.commits[0].at_s - self.start_s if self.commits else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, by SGLang's definition."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.completion_tokens - 1)

    def intervals(self, unit: Unit) -> list[float]:
        """Returns one interval in seconds per token, block or forward after the first arrival.

        Units that arrive together share the time since the arrival before them in equal parts,
        which is SGLang's inter-token latency. The time of an arrival without new units is added
        to the next one.
        """
        arrivals = self._arrivals()
        if not arrivals or getattr(arrivals[0], unit) is None:
            return []
        before, found = arrivals[0], []
        for commit in arrivals[1:]:
            new = getattr(commit, unit) - getattr(before, unit)
            if new > 0:
                found += [(commit.at_s - before.at_s) / new] * new
                before = commit
        return found

    def mean_interval_s(self, unit: Unit) -> float | None:
        """Returns seconds per token, block or forward between first and last arrival."""
        found = self.intervals(unit)
        return sum(found) / len(found) if found else None

    def _arrivals(self) -> list[Commit]:
        """Returns the commits; of commits that came together, only the last."""
        pairs = zip(self.commits, self.commits[1:], strict=False)
        ends = [one for one, after in pairs if after.at_s - one.at_s >= TOGETHER_S]
        return [*ends, *self.commits[-1:]]


def summarize(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """Returns SGLang's figures of a run, then ours; only requests that succeeded count."""
    done = [record for record in records if record.error is None]
    prompt = sum(record.prompt_tokens for record in done)
    output = sum(record.completion_tokens for record in done)
    latencies = [record.latency_s for record in done]
    itls = [interval for record in done for interval in record.intervals("tokens")]
    blocks = [interval for record in done for interval in record.intervals("blocks")]
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "input_throughput": prompt / duration_s,
        "output_throughput": output / duration_s,
        "total_throughput": (prompt + output) / duration_s,
        "concurrency": sum(latencies) / duration_s,
        **peaks(done),
        **spread("e2e_latency", latencies),
        **spread("ttft", [record.ttft_s for record in done]),
        **spread("tpot", [record.tpot_s for record in done]),
        **spread("itl", itls),
        "max_itl_ms": 1e3 * max(itls) if itls else None,
        **spread("inter_block_latency", blocks),
        **denoising(done),
    }


def spread(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    """Returns mean, median, standard deviation and percentiles in ms, with SGLang's keys."""
    values = 1e3 * np.asarray([value for value in seconds if value is not None], np.float64)
    figures = {"mean": np.mean, "median": np.median, "std": np.std} | {
        f"p{q}": lambda values, q=q: np.percentile(values, q) for q in PERCENTILES
    }
    return {
        f"{key}_{name}_ms": float(figure(values)) if values.size else None
        for key, figure in figures.items()
    }


def denoising(done: Sequence[Record]) -> dict[str, float | int | None]:
    """Returns NFE, TPF and blocks of those requests that have them.

    `tpf` is token-weighted (all tokens over all forwards), `mean_tpf` the mean over requests.
    """
    counted = [(record.completion_tokens, record.nfe) for record in done if record.nfe]
    block_counts = [record.blocks for record in done if record.blocks]
    nfe = sum(forwards for _, forwards in counted)
    blocks = sum(block_counts)
    return {
        "nfe_total": nfe if counted else None,
        "mean_nfe": nfe / len(counted) if counted else None,
        "max_nfe": max((forwards for _, forwards in counted), default=None),
        "tpf": sum(tokens for tokens, _ in counted) / nfe if counted else None,
        "mean_tpf": (
            sum(tokens / forwards for tokens, forwards in counted) / len(counted)
            if counted
            else None
        ),
        "blocks_total": blocks if block_counts else None,
        "mean_blocks": blocks / len(block_counts) if block_counts else None,
        "nfe_per_block": nfe / blocks if counted and blocks else None,
    }


def peaks(done: Sequence[Record]) -> dict[str, float | int]:
    """Returns the most tokens that arrived and the most open requests in one second of the run.

    Seconds are counted from the first request, as in SGLang. A token counts in the second in
    which it arrived, so the burst of a whole block is not smoothed.
    """
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begin = min(record.start_s for record in done)
    length = math.ceil(max(record.end_s for record in done) - begin) + 1
    tokens, open_requests = np.zeros(length, np.int64), np.zeros(length, np.int64)
    for record in done:
        before = 0
        for commit in record.commits:
            tokens[int(commit.at_s - begin)] += commit.tokens - before
            before = commit.tokens
        open_requests[int(record.start_s - begin) : int(record.end_s - begin) + 1] += 1
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(open_requests.max()),
    }


def engine_figures(
    before: Mapping[str, Any], after: Mapping[str, Any], output_tokens: int
) -> dict[str, Any]:
    """Returns what the engine's counters (`EngineStats`) say about the time between two reads.

    `forwards` counts decode forwards of the batch, so `tokens_per_forward` is for all rows
    together; a figure is None if the engine does not count it. `padding_fraction` covers all the
    time since the engine's start.
    """

    def grown(name: str) -> Any:
        known = name in before and name in after
        return after[name] - before[name] if known else None

    forwards = grown("decode_steps_total")
    idle_s, live_s = grown("device_idle_seconds_total"), grown("device_seconds_total")
    return {
        "forwards": forwards,
        "tokens_per_forward": output_tokens / forwards if forwards else None,
        "prefill_launches": grown("prefill_launches_total"),
        "decode_launches": grown("decode_launches_total"),
        "preemptions": grown("preemptions_total"),
        "jit_compiles": grown("jit_compiles_total"),
        "padding_fraction": after.get("padding_fraction"),
        "device_idle_fraction": idle_s / live_s if live_s else None,
    }
