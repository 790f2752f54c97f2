"""Routes that change what runs: flush the prefix cache, abort requests."""

from __future__ import annotations

import asyncio
import functools
import math
import time

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.server import middleware, protocol, responses, schemas, state

router = fastapi.APIRouter()

FLUSH_POLL_S = 0.05


@router.post("/flush_cache")
@router.get("/flush_cache", include_in_schema=False)
async def flush_cache(
    request: requests.Request, timeout: float = 0.0
) -> starlette_responses.Response:
    """Empties the prefix cache; waits up to `timeout` seconds for running requests to end."""
    if not math.isfinite(timeout) or timeout < 0:
        raise errors.RequestError(f"{timeout=} must be 0 or more seconds", param="timeout")
    server = state.of(request)
    deadline_s = time.monotonic() + timeout
    while not await asyncio.to_thread(server.engine.flush_cache):
        if time.monotonic() >= deadline_s or await request.is_disconnected():
            raise errors.RequestError(
                "the cache was not flushed because requests are running; try again or raise "
                "?timeout=",
                code="requests_running",
            )
        await asyncio.sleep(FLUSH_POLL_S)
    return starlette_responses.PlainTextResponse("Cache flushed.\n")


@router.post("/abort_request", openapi_extra=schemas.body(protocol.AbortRequest))
async def abort_request(request: requests.Request) -> starlette_responses.Response:
    """Aborts the requests whose id begins with `rid`, or all; 200 even if there are none."""
    server = state.of(request)
    body = await protocol.read(request, protocol.AbortRequest)
    if body.abort_all:
        if not middleware.may_administer(request.headers, server.server_config):
            raise responses.Forbidden("abort_all needs the admin API key", param="abort_all")
        prefix = ""
    elif body.rid:
        prefix = body.rid
    else:
        # An empty prefix would match the requests of every client.
        raise errors.RequestError("give a non-empty rid or abort_all", param="rid")
    abort = functools.partial(server.engine.abort, prefix, abort_all=bool(body.abort_all))
    aborted = await asyncio.to_thread(abort)
    return responses.json_response({"success": True, "num_aborted": aborted})
