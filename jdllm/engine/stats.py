"""Numbers about a running engine, for `/metrics`, `/server_info` and the log line."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from jdllm.scheduler.batch import LaunchResult, ScheduleBatch

THROUGHPUT_WINDOW_S = 5.0
THROUGHPUT_BINS = 50  # of a window


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; the metrics have the same names (`server/edge/metrics.py`). A GB is 1e9 bytes."""

    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    prompt_tokens_total: int
    generation_tokens_total: int
    cached_tokens_total: int
    num_requests_total: int
    num_aborted_requests_total: int
    denoising_steps_total: int
    canvas_positions_total: int
    canvas_full_forwards_total: int
    canvas_forwarded_tokens_total: int
    committed_tokens_total: int
    edited_tokens_total: int
    discarded_tokens_total: int
    preemptions_total: int
    prefill_launches_total: int
    decode_launches_total: int
    decode_steps_total: int
    padding_fraction: float
    batch_occupancy: float
    device_idle_seconds_total: float
    device_seconds_total: float
    jit_compiles_total: int
    jit_compile_seconds: float
    startup_time_seconds: float
    weight_memory_usage_gb: float
    kv_cache_memory_usage_gb: float
    launch_memory_usage_gb: float
    tp_size: int = 1
    ep_size: int = 1


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since start; only the engine thread changes them.

    `denoising_steps` counts row-forwards, `skipped_steps` those that left out most of the model,
    `canvas_full_forwards` those of them that computed a whole canvas. `canvas_positions` counts the
    positions that were computed for rows that denoise, `canvas_forwarded_tokens` those of them that
    belong to rows of canvases. `merged_forwards` counts the row-forwards of launches that forwarded
    several rows.
    """

    requests: int = 0
    aborted_requests: int = 0
    products: int = 0  # what requests end with that write no tokens: images
    prompt_tokens: int = 0
    generation_tokens: int = 0
    denoising_steps: int = 0
    skipped_steps: int = 0
    canvas_positions: int = 0
    canvas_full_forwards: int = 0
    canvas_forwarded_tokens: int = 0
    edited_tokens: int = 0
    discarded_tokens: int = 0
    prefill_launches: int = 0
    decode_launches: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    decode_row_places: int = 0
    merged_forwards: int = 0
    real_positions: int = 0
    computed_positions: int = 0

    def count_launch(self, batch: ScheduleBatch, result: LaunchResult) -> None:
        """Adds one launch: its rows' forwards, and real against padded positions."""
        self.real_positions += result.real_tokens
        self.computed_positions += result.computed_tokens
        if not batch.bucket.denoises:
            self.prefill_launches += 1
            return
        forwards = sum(row.nfe for row in result.rows)
        self.decode_launches += 1
        self.decode_steps += result.num_steps
        self.decode_rows += forwards
        self.decode_row_places += batch.bucket.rows * result.num_steps
        self.denoising_steps += forwards
        self.skipped_steps += sum(row.num_skipped for row in result.rows)
        if forwards > result.num_steps:
            self.merged_forwards += forwards
        self.canvas_positions += result.denoised_tokens
        self.canvas_forwarded_tokens += result.canvas_tokens
        self.canvas_full_forwards += result.num_full

    @property
    def padding_fraction(self) -> float:
        computed = self.computed_positions
        return 1.0 - self.real_positions / computed if computed else 0.0

    @property
    def batch_occupancy(self) -> float:
        return self.decode_rows / self.decode_row_places if self.decode_row_places else 0.0


class Throughput:
    """Tokens per second over the last few seconds; read from any thread.

    Tokens are counted in bins of time, so that neither memory nor reading grows with the launches.
    """

    def __init__(
        self, window_s: float = THROUGHPUT_WINDOW_S, now: Callable[[], float] = time.monotonic
    ):
        self._bin_s = window_s / THROUGHPUT_BINS
        self._now = now
        self._created_s = now()
        # (number of the bin, its tokens), the latest last; bins without tokens are left out.
        self._bins: collections.deque[tuple[int, int]] = collections.deque(maxlen=THROUGHPUT_BINS)

    def add(self, tokens: int) -> None:
        """Counts tokens committed now; called by the engine thread alone."""
        number = int(self._now() / self._bin_s)
        if self._bins and self._bins[-1][0] == number:
            self._bins[-1] = (number, self._bins[-1][1] + tokens)
        else:
            self._bins.append((number, tokens))

    def per_second(self) -> float:
        """Returns the rate over the last bins of a window, or since the start if that is shorter.

        The last bin is the one that has just begun.
        """
        now = self._now()
        first = int(now / self._bin_s) - THROUGHPUT_BINS + 1
        tokens = sum(tokens for number, tokens in self._bins.copy() if number >= first)
        return tokens / max(now - max(first * self._bin_s, self._created_s), 1e-3)
