"""Routes that change what runs: flush the prefix cache, abort requests, take profiles."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import pathlib
import tempfile
import time
from typing import Any

import fastapi
import pydantic
from pydantic import StrictStr
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.server import middleware, state
from jdllm.server.edge import bodies, request_context, request_model, responses, schemas
from jdllm.server.sglang.requests import AbortRequest

router = fastapi.APIRouter()

FLUSH_POLL_S = 0.05
ACTIVITIES = ("CPU", "GPU")  # JAX records both, always


class ProfileRequest(request_model.RequestModel):
    """SGLang's fields; those that JAX's profiler has no counterpart for must ask for nothing."""

    output_dir: StrictStr | None = None
    num_steps: request_model.Integer | None = None
    activities: list[StrictStr] | None = None
    start_step: None = None
    profile_by_stage: bool | None = None
    profile_stages: list[StrictStr] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    merge_profiles: bool | None = None
    detailed_annotations: bool | None = None
    profile_id: None = None
    profile_prefix: None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> ProfileRequest:
        if self.num_steps is not None and self.num_steps < 1:
            raise errors.RequestError("num_steps must be 1 or more", param="num_steps")
        for activity in self.activities or ():
            if activity not in ACTIVITIES:
                raise errors.RequestError(
                    f"activities must be of {', '.join(ACTIVITIES)}", param="activities"
                )
        asked: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "profile_by_stage",
                "profile_stages",
                "record_shapes",
                "merge_profiles",
                "detailed_annotations",
            )
        }
        for name, value in asked.items():
            if value:
                raise errors.RequestError(
                    f"{name} is not supported by JAX's profiler; leave it out", param=name
                )
        return self


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
    while not await asyncio.to_thread(server.served.flush_cache):
        if time.monotonic() >= deadline_s or await request.is_disconnected():
            raise errors.RequestError(
                "the cache was not flushed because requests are running; try again or raise "
                "?timeout=",
                code="requests_running",
            )
        await asyncio.sleep(FLUSH_POLL_S)
    return starlette_responses.PlainTextResponse("Cache flushed.\n")


@router.post("/abort_request", openapi_extra=schemas.body(AbortRequest))
async def abort_request(request: requests.Request) -> starlette_responses.Response:
    """Aborts the request named `rid`, or all; 200 even if there is none.

    The name is exact, and only what the caller's own API key began is aborted; the key of the
    administrator may abort everything (`live_requests` says why SGLang's rule is not kept). On a
    server without keys all callers are the same.
    """
    server = state.of(request)
    body = await bodies.read(request, AbortRequest)
    caller = request_context.CALLER.get()
    if body.abort_all:
        abort = _abort_all(request, server, caller)
    elif body.rid:
        abort = functools.partial(server.served.abort, server.live.named(body.rid, caller))
    else:
        raise errors.RequestError("give a non-empty rid or abort_all", param="rid")
    aborted = await asyncio.to_thread(abort)
    return responses.json_response({"success": True, "num_aborted": aborted})


def _abort_all(
    request: requests.Request, server: state.ServerState, caller: request_context.Caller
) -> functools.partial[int]:
    if middleware.is_from_other_page(request.headers):
        raise responses.Forbidden(
            "web pages of other origins may not use abort_all", param="abort_all"
        )
    if server.keys.may_abort_all(caller):
        return functools.partial(server.served.abort, abort_all=True)
    if server.keys.admin:
        raise responses.Forbidden("abort_all needs the admin API key", param="abort_all")
    return functools.partial(server.served.abort, server.live.all_of(caller))


@router.post("/start_profile", openapi_extra=schemas.body(ProfileRequest))
async def start_profile(request: requests.Request) -> starlette_responses.Response:
    """Begins a trace of JAX's profiler; it ends after `num_steps` launches or with /stop_profile.

    `output_dir` must lie in the folder of --profile-dir; without it a new folder there is taken.
    """
    server = state.of(request)
    body = ProfileRequest()
    if await request.body():
        body = await bodies.read(request, ProfileRequest)
    folder = _profile_folder(server.server_config.profile_dir, body.output_dir)
    start = functools.partial(
        server.served.start_profile,
        folder,
        num_steps=body.num_steps,
        with_stack=body.with_stack is not False,
    )
    try:
        await asyncio.to_thread(start)
    except errors.RequestError:
        with contextlib.suppress(OSError):  # it was there before, and holds a trace
            pathlib.Path(folder).rmdir()
        raise
    return responses.json_response({"success": True, "output_dir": folder})


@router.post("/stop_profile")
async def stop_profile(request: requests.Request) -> starlette_responses.Response:
    """Ends the trace and writes it, which takes some seconds; TensorBoard and Perfetto read it."""
    folder = await asyncio.to_thread(state.of(request).served.stop_profile)
    return responses.json_response({"success": True, "output_dir": folder})


def _profile_folder(profile_dir: str | None, output_dir: str | None) -> str:
    """Returns the folder of a new trace: clients may not write wherever the server may."""
    base = pathlib.Path(profile_dir or tempfile.gettempdir()).resolve()
    try:
        if output_dir is None:
            base.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix="jdllm-profile-", dir=base)
        folder = (base / output_dir).resolve()
        if folder.is_relative_to(base):
            folder.mkdir(parents=True, exist_ok=True)
            return str(folder)
    except (OSError, ValueError) as error:  # a name with a zero byte, a full disk
        raise errors.RequestError(
            f"the folder of the profile cannot be made: {type(error).__name__}", param="output_dir"
        ) from error
    raise errors.RequestError(
        f"output_dir={errors.quote(output_dir)} must lie in {str(base)!r} (--profile-dir)",
        param="output_dir",
    )
