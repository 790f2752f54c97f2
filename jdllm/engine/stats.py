"""Numbers about a running engine, for `/metrics`, `/server_info` and the log line."""

from __future__ import annotations

import dataclasses
import time

from jdllm.scheduler import batch as batch_lib

THROUGHPUT_WINDOW_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; names are those of the metrics (`server/metrics.py`). GB are 1e9 bytes."""

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
    committed_tokens_total: int
    edited_tokens_total: int
    discarded_tokens_total: int
    preemptions_total: int
    prefill_launches_total: int
    decode_launches_total: int
    padding_fraction: float
    batch_occupancy: float
    jit_compiles_total: int
    jit_compile_seconds: float
    startup_time_seconds: float
    weight_memory_usage_gb: float
    kv_cache_memory_usage_gb: float


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since start, mutated by the engine thread only."""

    requests: int = 0
    aborted_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    denoising_steps: int = 0
    canvas_positions: int = 0
    edited_tokens: int = 0
    discarded_tokens: int = 0
    prefill_launches: int = 0
    decode_launches: int = 0
    decode_rows: int = 0
    decode_row_places: int = 0
    real_positions: int = 0
    computed_positions: int = 0

    def count_launch(self, batch: batch_lib.ScheduleBatch) -> None:
        """Adds one launch: its rows, and real against padded positions."""
        self.real_positions += sum(row.num_tokens for row in batch.rows)
        self.computed_positions += batch.bucket.tokens
        match batch.phase:
            case batch_lib.Phase.PREFILL:
                self.prefill_launches += 1
            case batch_lib.Phase.DECODE:
                self.decode_launches += 1
                self.decode_rows += len(batch.rows)
                self.decode_row_places += batch.bucket.rows
                self.denoising_steps += len(batch.rows)
                self.canvas_positions += sum(row.num_tokens for row in batch.rows)

    @property
    def padding_fraction(self) -> float:
        computed = self.computed_positions
        return 1.0 - self.real_positions / computed if computed else 0.0

    @property
    def batch_occupancy(self) -> float:
        return self.decode_rows / self.decode_row_places if self.decode_row_places else 0.0


class Throughput:
    """Tokens per second over the last few seconds."""

    def __init__(self, window_s: float = THROUGHPUT_WINDOW_S):
        self._window_s = window_s
        self._events: list[tuple[float, int]] = []

    def add(self, tokens: int) -> None:
        """Counts tokens committed now."""
        self._events.append((time.monotonic(), tokens))
        self._trim()

    def per_second(self) -> float:
        """Returns the rate over the window, 0 when nothing was committed in it."""
        self._trim()
        if not self._events:
            return 0.0
        span = max(time.monotonic() - self._events[0][0], 1e-3)
        return sum(tokens for _, tokens in self._events) / span

    def _trim(self) -> None:
        oldest = time.monotonic() - self._window_s
        self._events = [event for event in self._events if event[0] >= oldest]
