"""What `/metrics` shows: the engine's numbers, and the latencies of requests.

Names are SGLang's with the prefix `jdllm:`. The engine's numbers are read from `Engine.stats()`
at scrape time. Latencies are measured here, because requests arrive and leave here. Each app has
its own registry: two apps in one process (tests, notebooks) do not share counters.
"""

from __future__ import annotations

import dataclasses
import http
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import core

from jdllm.server.edge import log_format, request_context, responses

if TYPE_CHECKING:
    from jdllm.engine import generations, serving
    from jdllm.engine.images import requests

logger = logging.getLogger(__name__)

PREFIX = "jdllm:"
# Labels come from closed sets. A client may invent methods without end, and a label lives as long
# as the process does.
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER_METHOD, OTHER_ENDPOINT, OTHER_STATUS = "OTHER", "other", "other"
MODEL_CARD, IMAGE = "/v1/models/{id}", "/v1/images/{id}/content"
STATUSES = frozenset({*map(int, http.HTTPStatus), responses.CLIENT_CLOSED_REQUEST})
# Statistics that exist only for diffusion carry `dllm_` in their metric name.
DLLM_STATS = {
    "denoising_steps_total",
    "decode_steps_total",
    "canvas_positions_total",
    "canvas_full_forwards_total",
    "canvas_forwarded_tokens_total",
    "committed_tokens_total",
    "edited_tokens_total",
    "discarded_tokens_total",
    "padding_fraction",
    "batch_occupancy",
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
TOKENS_PER_FORWARD = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# name, help, buckets
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Arrival to first committed block.", SECONDS),
    ("inter_token_latency_seconds", "Time between events over the tokens of an event.", SECONDS),
    ("inter_block_latency_seconds", "Time between two events of one choice.", SECONDS),
    ("request_time_per_output_token_seconds", "Decode time over output tokens.", SECONDS),
    ("e2e_request_latency_seconds", "Arrival to last token.", SECONDS),
    ("queue_time_seconds", "Arrival to first launch.", SECONDS),
    ("prompt_tokens_histogram", "Prompt tokens of a request.", TOKENS),
    ("generation_tokens_histogram", "Output tokens of a choice.", TOKENS),
    ("dllm_tokens_per_forward", "Output tokens of a choice over its forwards.", TOKENS_PER_FORWARD),
    ("dllm_block_steps", "Denoise steps a block took.", STEPS),
    ("image_encode_seconds", "Text encoding of an image.", SECONDS),
    ("image_denoise_seconds", "Denoising of an image, from its first step to its last.", SECONDS),
    ("image_decode_seconds", "Latents to pixels of an image.", SECONDS),
    ("image_steps", "Denoising steps of an image.", STEPS),
)


class EngineCollector:
    """Turns `Engine.stats()` into samples when Prometheus scrapes."""

    def __init__(self, find_engine: Callable[[], serving.Serving | None]):
        self._find_engine = find_engine

    def collect(self) -> Iterator[core.Metric]:
        engine = self._find_engine()
        if engine is None:
            return
        replicas = engine.stats_per_replica()
        if not replicas:
            yield from _families(["model_name"], {(engine.model_name,): engine.stats()})
            return
        rows = {(engine.model_name, replica): stats for replica, stats in replicas.items()}
        yield from _families(["model_name", "replica"], rows)


def _families(
    labels: Sequence[str], rows: Mapping[tuple[str, ...], serving.Stats]
) -> Iterator[core.Metric]:
    """Yields a metric for each number of the statistics, with a sample for each row."""
    numbers = {values: dataclasses.asdict(stats) for values, stats in rows.items()}
    for name in next(iter(numbers.values())):
        full = PREFIX + ("dllm_" if name in DLLM_STATS else "") + name
        counter = name.endswith("_total")
        family = core.CounterMetricFamily if counter else core.GaugeMetricFamily
        metric = family(full, name.replace("_", " "), labels=labels)
        for values, stats in numbers.items():
            metric.add_metric(values, stats[name])
        yield metric


class EdgeMetrics:
    """The histograms and counters of one app, and the registry that renders them."""

    def __init__(self, find_engine: Callable[[], serving.Serving | None]):
        self._find_engine = find_engine
        self._endpoints: frozenset[str] = frozenset()
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(EngineCollector(find_engine))
        self._histograms = {
            name: prometheus_client.Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry
            )
            for name, text, buckets in HISTOGRAMS
        }
        self._requests = prometheus_client.Counter(
            PREFIX + "http_requests_total",
            "HTTP requests received.",
            ["endpoint", "method"],
            registry=self._registry,
        )
        self._responses = prometheus_client.Counter(
            PREFIX + "http_responses_total",
            "HTTP responses sent; 499 means that the client left first.",
            ["endpoint", "method", "status_code"],
            registry=self._registry,
        )

    def know(self, paths: Iterable[str]) -> None:
        """Tells which paths are labels of their own; all others share one."""
        self._endpoints = frozenset(paths)

    def count_request(self, path: str, method: str) -> None:
        self._requests.labels(self._endpoint(path), _method(method)).inc()

    def count_response(self, path: str, method: str, status: int) -> None:
        code = str(status) if status in STATUSES else OTHER_STATUS
        self._responses.labels(self._endpoint(path), _method(method), code).inc()

    def observe(self, name: str, value: float) -> None:
        """Adds one value to a histogram of `HISTOGRAMS`."""
        engine = self._find_engine()
        if engine is not None:
            self._histograms[name].labels(engine.model_name).observe(value)

    def render(self) -> bytes:
        """Returns the Prometheus text format."""
        return prometheus_client.generate_latest(self._registry)

    def _endpoint(self, path: str) -> str:
        if path in self._endpoints:
            return path
        if path.startswith("/v1/images/") and path.endswith("/content"):
            return IMAGE
        return MODEL_CARD if path.startswith("/v1/models/") else OTHER_ENDPOINT


def _method(method: str) -> str:
    return method if method in METHODS else OTHER_METHOD


@dataclasses.dataclass(slots=True)
class Tracker:
    """Watches the events of one choice and records its latencies and its log line."""

    metrics: EdgeMetrics
    arrival_s: float
    first_s: float | None = None
    last_s: float = 0.0
    nfe: int = 0
    blocks: int = 0

    def see(self, generation: generations.Generation) -> None:
        """Records one event."""
        now, meta = time.monotonic(), generation.meta_info
        if generation.delta_ids:
            self._see_tokens(len(generation.delta_ids), now)
        new_blocks = meta["dllm"]["blocks"] - self.blocks
        if new_blocks > 0:
            self.metrics.observe("dllm_block_steps", (meta["dllm"]["nfe"] - self.nfe) / new_blocks)
            self.nfe, self.blocks = meta["dllm"]["nfe"], meta["dllm"]["blocks"]
        if generation.finish_reason is not None:
            self._see_end(generation, generation.finish_reason["type"], now)

    def _see_tokens(self, tokens: int, now: float) -> None:
        if self.first_s is None:
            self.first_s = now
            self.metrics.observe("time_to_first_token_seconds", now - self.arrival_s)
        else:
            self.metrics.observe("inter_block_latency_seconds", now - self.last_s)
            self.metrics.observe("inter_token_latency_seconds", (now - self.last_s) / tokens)
        self.last_s = now

    def _see_end(self, generation: generations.Generation, reason: str, now: float) -> None:
        meta = generation.meta_info
        tokens = meta["completion_tokens"]
        self.metrics.observe("e2e_request_latency_seconds", now - self.arrival_s)
        self.metrics.observe("queue_time_seconds", meta["queue_time"])
        self.metrics.observe("prompt_tokens_histogram", meta["prompt_tokens"])
        self.metrics.observe("generation_tokens_histogram", tokens)
        self.metrics.observe("dllm_tokens_per_forward", meta["dllm"]["tpf"])
        if self.first_s is not None and tokens > 1:
            each = (now - self.first_s) / (tokens - 1)
            self.metrics.observe("request_time_per_output_token_seconds", each)
        logger.info(
            "Finish: rid=%s, index=%d, reason=%s, prompt=%d, cached=%d, output=%d, nfe=%d, "
            "tpf=%.2f, e2e=%.3fs, x-request-id=%s",
            log_format.word(generation.request_id),
            generation.index,
            reason,
            meta["prompt_tokens"],
            meta["cached_tokens"],
            tokens,
            meta["dllm"]["nfe"],
            meta["dllm"]["tpf"],
            now - self.arrival_s,
            request_context.REQUEST_ID.get(),
        )


def observe_image(
    metrics: EdgeMetrics, event: requests.ImageEvent, name: str, arrival_s: float
) -> None:
    """Records the latencies of an image that has ended, and its log line."""
    e2e_s = time.monotonic() - arrival_s
    for histogram, value in (
        ("e2e_request_latency_seconds", e2e_s),
        ("queue_time_seconds", event.queue_s),
        ("prompt_tokens_histogram", event.prompt_tokens),
        ("image_encode_seconds", event.encode_s),
        ("image_denoise_seconds", event.denoise_s),
        ("image_decode_seconds", event.decode_s),
        ("image_steps", event.steps),
    ):
        metrics.observe(histogram, value)
    logger.info(
        "Finish: rid=%s, reason=%s, prompt=%d, truncated=%d, steps=%d, queue=%.3fs, encode=%.3fs, "
        "denoise=%.3fs, decode=%.3fs, e2e=%.3fs, x-request-id=%s",
        log_format.word(name),
        event.kind,
        event.prompt_tokens,
        event.truncated_tokens,
        event.steps,
        event.queue_s,
        event.encode_s,
        event.denoise_s,
        event.decode_s,
        e2e_s,
        request_context.REQUEST_ID.get(),
    )
