"""What an image benchmark measures: a server over HTTP, or an engine in this process.

Both answer one request per call, and many threads call them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any, Protocol

from jdllm import errors
from jdllm.bench import command_line, running_server
from jdllm.bench.images import load, stats
from jdllm.client import failures, transport
from jdllm.engine.images.requests import ImageEvent, ImageRequest, ImageServing

ROUTE = "/v1/images/generations"
# Fields of a request that an engine takes beside those of the load.
OWN_FIELDS = frozenset(
    ["negative_prompt", "guidance_scale", "true_cfg_scale", "cfg_truncation", "cfg_normalization",
     "max_sequence_length"]
)  # fmt: skip

# What an engine says of itself that identifies what was measured.
_KEPT = ("dtype", "quantization", "pipeline", "batching_max_size", "warmup_resolutions")


class Target(Protocol):
    """Answers requests; a failure is put into the record, not raised."""

    label: str

    def send(self, ask: load.Ask, /) -> stats.Record: ...

    def state(self) -> dict[str, Any]:
        """Returns the engine's counters, {} if there are none."""
        ...

    def describe(self) -> dict[str, Any]: ...


class Http:
    """A server with OpenAI's images endpoint."""

    def __init__(self, client: transport.Client, model: str, label: str | None = None):
        self.label = label or client.base_url
        self._client = client
        self._model = model

    def send(self, ask: load.Ask) -> stats.Record:
        """Sends one request and reads the whole answer; the pictures are not decoded."""
        body = self.body(ask)
        start_s = time.perf_counter()
        try:
            answer = self._client.json("POST", ROUTE, body)
            end_s = time.perf_counter()
            return _record_of(answer, ask, start_s, end_s)
        except failures.CallFailed as failure:
            end_s = time.perf_counter()
            return stats.Record(start_s=start_s, end_s=end_s, slo_s=ask.slo_s, error=str(failure))

    def body(self, ask: load.Ask) -> dict[str, Any]:
        """Returns the JSON body of a request."""
        found: dict[str, Any] = {
            "model": self._model,
            "prompt": ask.prompt,
            "n": ask.count,
            "seed": ask.seed,
            "response_format": "b64_json",
        }
        if ask.width is not None:
            found["size"] = f"{ask.width}x{ask.height}"
        if ask.num_inference_steps is not None:
            found["num_inference_steps"] = ask.num_inference_steps
        return command_line.merged(found, ask.extra)

    def state(self) -> dict[str, Any]:
        return running_server.state(running_server.server_info(self._client))

    def describe(self) -> dict[str, Any]:
        """Returns where it is and what it says of itself."""
        info = running_server.server_info(self._client) or {}
        keep = ("device", *_KEPT, "version")
        return {
            "kind": "http",
            "base_url": self._client.base_url,
            "model": self._model,
            **{key: info[key] for key in keep if key in info},
        }


class InProcess:
    """An engine of this process, asked as its server asks it."""

    def __init__(self, engine: ImageServing, label: str = "in process"):
        self.label = label
        self._engine = engine
        self._numbers = itertools.count()

    def send(self, ask: load.Ask) -> stats.Record:
        """Makes the images of one request; the event loop is the calling thread's own."""
        requests = _requests(ask)
        start_s = time.perf_counter()
        error = None
        try:
            finals = asyncio.run(self._finals(requests))
        except errors.RequestError as refusal:
            finals, error = [], str(refusal)
        end_s = time.perf_counter()
        failed = [event.message for event in finals if event.kind != "final"]
        times = [{name: getattr(event, f"{name}_s") for name in stats.PHASES} for event in finals]
        return stats.Record(
            start_s=start_s,
            end_s=end_s,
            images=len(finals),
            steps=sum(event.steps for event in finals),
            times=tuple(times),
            slo_s=ask.slo_s,
            error=error or (failed[0] if failed else None),
        )

    def state(self) -> dict[str, Any]:
        return running_server.state(self._engine.server_info())

    def describe(self) -> dict[str, Any]:
        """Returns what identifies the model and the machine."""
        info = self._engine.server_info()
        keep = (*_KEPT, "load_format")
        return {
            "kind": "in process",
            "model": self._engine.model_name,
            "device": str(self._engine.device),
            **{key: info[key] for key in keep if key in info},
        }

    async def _finals(self, asked: list[ImageRequest]) -> list[ImageEvent]:
        rid = f"bench-{next(self._numbers)}"
        async with contextlib.aclosing(self._engine.stream(asked, rid=rid)) as events:
            return [event async for event in events if event.kind != "partial"]


def check_fields(extra: Mapping[str, Any]) -> None:
    """Refuses fields of the body that an engine in this process does not know."""
    for name in extra:
        if name not in OWN_FIELDS:
            hint = errors.nearest(name, OWN_FIELDS)
            raise errors.ConfigError(f"unknown field {name!r} of a request in process{hint}")


def _requests(ask: load.Ask) -> list[ImageRequest]:
    first = ImageRequest(
        prompt=ask.prompt,
        width=ask.width,
        height=ask.height,
        num_inference_steps=ask.num_inference_steps,
        **ask.extra,
    )
    return [dataclasses.replace(first, seed=ask.seed + place) for place in range(ask.count)]


def _record_of(answer: Any, ask: load.Ask, start_s: float, end_s: float) -> stats.Record:
    """Returns the record of a whole answer; fields that the server does not send stay empty."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or len(data) != ask.count:
        raise failures.BadAnswer(f"{ROUTE} answers without the {ask.count} images asked for")
    steps, times = 0, []
    for item in data:
        told = item.get("timings") or {}
        times.append({n: told[f"{n}_s"] for n in stats.PHASES if f"{n}_s" in told})
        steps += item.get("num_inference_steps") or ask.num_inference_steps or 0
    return stats.Record(
        start_s=start_s,
        end_s=end_s,
        images=len(data),
        steps=steps,
        times=tuple(times),
        peak_memory_mb=answer.get("peak_memory_mb"),  # SGLang's servers send it
        slo_s=ask.slo_s,
    )
