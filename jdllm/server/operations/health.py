"""Routes that report the state of the server, and which model it serves."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import fastapi
import prometheus_client
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import version
from jdllm.engine import requests as engine_requests
from jdllm.engine.images import checks
from jdllm.engine.images.requests import ImageRequest
from jdllm.options import sampling_params
from jdllm.server import running, state
from jdllm.server.edge import request_forms, responses
from jdllm.server.images import events
from jdllm.server.images.events import Call

if TYPE_CHECKING:
    from jdllm.engine.tokenizer import Tokenizer

router = fastapi.APIRouter()

# A step of the largest bucket takes seconds on a slow device; after this long, it is stuck.
HEARTBEAT_LIMIT_S = 120.0
GENERATE_LIMIT_S = 20.0
PROBE = "Hello"


@router.get("/health")
@router.get("/ready")
@router.get("/readyz")
@router.get("/ping")
async def health(request: requests.Request) -> starlette_responses.Response:
    """Answers 200 while requests are served, else 503 and the reason; does not use the device."""
    server = state.of(request)
    if server.phase == "starting":
        return _unavailable({"status": "starting"} | server.progress.as_dict())
    if server.phase == "draining":
        return _unavailable({"status": "draining"})
    return _stuck(server) or responses.json_response({"status": "ok"})


@router.get("/livez")
async def livez(request: requests.Request) -> starlette_responses.Response:
    """Answers 200 unless only a restart helps; a server that starts or drains is alive."""
    server = state.of(request)
    stuck = None if server.loaded_engine is None else _stuck(server)
    return stuck or responses.json_response({"status": "ok"})


def _stuck(server: state.ServerState) -> starlette_responses.Response | None:
    """Returns the answer of a server whose engine makes no progress, None while it does."""
    age_s = server.served.heartbeat_age_s()
    if server.served.is_alive and age_s <= HEARTBEAT_LIMIT_S:
        return None
    return _unavailable({"status": "stuck", "heartbeat_age_s": round(age_s, 1)})


@router.get("/version")
async def show_version(_: requests.Request) -> starlette_responses.Response:
    """Returns the version, in vLLM's shape."""
    return responses.json_response({"version": version.__version__})


@router.get("/health_generate")
async def health_generate(request: requests.Request) -> starlette_responses.Response:
    """Generates one block, or an image in one step, before all that waits.

    Answers 200, or 503 when that takes too long.
    """
    server = state.of(request)
    work = asyncio.wait_for(_probe(server), GENERATE_LIMIT_S)
    try:
        await running.unless_client_leaves(request, work)
    except TimeoutError:
        return _unavailable({"status": "stuck", "waited_s": GENERATE_LIMIT_S})
    return responses.json_response({"status": "ok"})


async def _probe(server: state.ServerState) -> None:
    rid = running.new_request_id("health")
    priority = engine_requests.best_priority(server.served.config)
    if server.served.output_modality == "image":
        facts = server.images.facts
        height, width = facts.compiled_size or (None, None)  # others may wait for a compilation
        probe = ImageRequest(prompt=PROBE, height=height, width=width, num_inference_steps=1)
        request = checks.resolve(probe, facts)
        await events.collect(server, Call(requests=[request], rid=rid, priority=priority))
        return
    prompt_list = running.PromptList(
        prompts=[probe_ids(server.engine.tokenizer)],
        params=[sampling_params.SamplingParams(max_new_tokens=1)],
        request_ids=[rid],
        priority=priority,
    )
    await running.collect(server, prompt_list)


def probe_ids(tokenizer: Tokenizer | None) -> list[int]:
    """Returns a short prompt for warm-up and health checks."""
    return [0] if tokenizer is None else tokenizer.encode(PROBE)


@router.get("/metrics")
def metrics(request: requests.Request) -> starlette_responses.Response:
    """Returns Prometheus text; needs --enable-metrics.

    A thread runs it, since it is no coroutine: a scrape writes a line for every series.
    """
    server = state.of(request)
    if not server.server_config.enable_metrics:
        return responses.error_response(
            "metrics are off; start the server with --enable-metrics",
            status=404,
            code="not_found",
        )
    return starlette_responses.Response(
        server.metrics.render(), media_type=prometheus_client.CONTENT_TYPE_LATEST
    )


@router.get("/v1/models")
async def models(request: requests.Request) -> starlette_responses.Response:
    """Lists the model that is served."""
    return responses.json_response({"object": "list", "data": [_card(state.of(request))]})


@router.get("/v1/models/{model_id:path}")
async def model(request: requests.Request, model_id: str) -> starlette_responses.Response:
    """Returns the card of the served model; 404 for any other name."""
    server = state.of(request)
    if model_id != request_forms.canonical(server.served.model_name):
        raise state.model_not_found(model_id)
    return responses.json_response(_card(server))


def _card(server: state.ServerState) -> dict[str, Any]:
    served = server.served
    card = {
        "id": served.model_name,
        "object": "model",
        "created": server.created_s,
        "owned_by": "jdllm",
        "root": served.model_name,
        "parent": None,
        # OpenRouter's way to tell what a model takes and makes.
        "architecture": {
            "input_modalities": ["text"],
            "output_modalities": [served.output_modality],
        },
    }
    if served.output_modality == "text":
        card["max_model_len"] = server.engine.context_length
    return card


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: requests.Request) -> starlette_responses.Response:
    """Returns SGLang's description of the model."""
    return responses.json_response(state.of(request).served.model_info())


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: requests.Request) -> starlette_responses.Response:
    """Returns the resolved options (no keys), the engine's state and the version."""
    server = state.of(request)
    options = dataclasses.asdict(server.server_config)
    del options["api_key"], options["admin_api_key"]
    content = options | {"version": version.__version__} | server.served.server_info()
    return responses.json_response(content)


def _unavailable(content: dict[str, Any]) -> starlette_responses.Response:
    headers = {"Retry-After": str(responses.START_RETRY_AFTER_S)}
    return responses.json_response(content, status=503, headers=headers)
