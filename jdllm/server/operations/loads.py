"""How busy the server is, for routers in front of several servers: SGLang's load routes.

`/v1/loads` has the shape of SGLang 0.5.23, without what does not exist here (speculation, LoRA,
disaggregation). `/get_load` has the older shape, a list with one entry, which sglang-router reads.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

import fastapi
import prometheus_client
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors, version
from jdllm.server import state
from jdllm.server.edge import responses

if TYPE_CHECKING:
    from jdllm.engine.stats import EngineStats

router = fastapi.APIRouter()

SECTIONS = ("all", "core", "disagg", "lora", "memory", "queues", "spec")


@router.get("/v1/loads")
async def loads(
    request: requests.Request,
    dp_rank: int | None = None,
    include: str | None = None,
    format: str | None = None,
) -> starlette_responses.Response:
    """Returns running and waiting requests, tokens and memory, as JSON or for Prometheus.

    `include` names sections, separated by commas; the core numbers are always there.
    """
    if dp_rank not in (None, 0):
        raise errors.RequestError(f"{dp_rank=}: this server has rank 0 only", param="dp_rank")
    if format not in (None, "json", "prometheus"):
        raise errors.RequestError("format must be json or prometheus", param="format")
    sections = {"all"} if include is None else {part.strip() for part in include.split(",")}
    unknown = sorted(sections - set(SECTIONS))
    if unknown:
        raise errors.RequestError(
            f"include: {errors.quote(unknown[0])} is none of {', '.join(SECTIONS)}",
            param="include",
        )
    server = state.of(request)
    load = _load(server, sections)
    if format == "prometheus":
        return starlette_responses.Response(
            _prometheus(load), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )
    return responses.json_response(
        {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": version.__version__,
            "accelerator": server.served.device.device_kind,
            "num_accelerators": 1,
            "loads": [load],
        }
    )


@router.get("/get_load")
async def get_load(request: requests.Request) -> starlette_responses.Response:
    """Returns the load in the older shape; `num_tokens` counts those that are held."""
    server = state.of(request)
    stats = server.served.stats()
    is_text = server.served.output_modality == "text"
    num_tokens = server.engine.stats().num_used_tokens if is_text else 0
    entry = {
        "rid": None,
        "http_worker_ipc": None,
        "dp_rank": 0,
        "num_reqs": stats.num_running_reqs + stats.num_queue_reqs,
        "num_waiting_reqs": stats.num_queue_reqs,
        "num_tokens": num_tokens,
        "ts_tic": time.perf_counter(),
    }
    return responses.json_response([entry])


def _load(server: state.ServerState, sections: set[str]) -> dict[str, Any]:
    stats = server.served.stats()
    capacity = max(stats.max_running_requests, 1)
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.num_running_reqs,
        "num_waiting_reqs": stats.num_queue_reqs,
        "max_running_requests": stats.max_running_requests,
        "utilization": stats.num_running_reqs / capacity,
    }
    if server.served.output_modality == "text":
        load |= _token_load(server.engine.stats(), sections)
    if sections & {"all", "queues"}:
        load["queues"] = {"waiting": stats.num_queue_reqs}
    return load


def _token_load(stats: EngineStats, sections: set[str]) -> dict[str, Any]:
    """Returns the numbers that only an engine with tokens and their pages has."""
    load: dict[str, Any] = {
        "num_used_tokens": stats.num_used_tokens,
        "num_total_tokens": stats.num_used_tokens,
        "num_active_tokens": stats.num_used_tokens,
        "max_total_num_tokens": stats.max_total_num_tokens,
        "token_usage": stats.token_usage,
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.cache_hit_rate,
    }
    if sections & {"all", "memory"}:
        load["memory"] = {
            "weight_gb": stats.weight_memory_usage_gb,
            "kv_cache_gb": stats.kv_cache_memory_usage_gb,
            "graph_gb": stats.launch_memory_usage_gb,
            "token_capacity": stats.max_total_num_tokens,
        }
    return load


def _prometheus(load: dict[str, Any]) -> str:
    """Returns the numbers as gauges, under SGLang's names: `sglang_` and the section."""
    flat: dict[str, float] = {}
    for name, value in load.items():
        parts = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}_{part}".rstrip("_"): number for part, number in parts.items()}
    del flat["dp_rank"]
    lines: list[str] = []
    for name, number in flat.items():
        lines += [f"# TYPE sglang_{name} gauge", f'sglang_{name}{{dp_rank="0"}} {number}']
    return "\n".join(lines) + "\n"
