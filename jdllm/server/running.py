"""Runs the prompts of one HTTP request on the engine, and aborts them when the client leaves.

An HTTP request is a list of prompts, each with `n` choices, and the engine takes all of them
or none. Whatever ends the consumer (end, error, disconnect, cancellation) closes the engine's
iterator, and a closed iterator frees its pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette import requests
from starlette import types as asgi

from jdllm import errors
from jdllm.engine import generations
from jdllm.engine import requests as engine_requests
from jdllm.options import sampling_params
from jdllm.server import state
from jdllm.server.edge import bodies, metrics, responses

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptList:
    """The prompts of one HTTP request, with the options and the id of each.

    The output of each prompt stands between the prompt and `suffix_ids`. With `is_prompt_only`
    nothing is written at all (`max_tokens: 0`), whatever `params` say. `field_names` maps the
    engine's names (`prompt`, `max_new_tokens` and so on) to the fields of the body, where the
    two differ. `shows_frames`: the answer has a place for the frames of `stream_mode: "denoise"`.
    """

    prompts: list[list[int]]
    params: list[sampling_params.SamplingParams]
    request_ids: list[str]
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suffix_ids: Sequence[int] = ()
    priority: int | None = None
    is_prompt_only: bool = False
    shows_frames: bool = False

    def choice_index(self, generation: generations.Generation) -> int:
        """Returns the place of a choice among the choices of all prompts."""
        return self._first_indices[generation.prompt_index] + generation.index

    @functools.cached_property
    def _first_indices(self) -> list[int]:
        return list(itertools.accumulate((one.n for one in self.params), initial=0))


def new_request_id(prefix: str) -> str:
    """Returns a new id; the engine and the answer both use it, so a client can abort by it."""
    return f"{prefix}-{uuid.uuid4().hex}"


def ids_of_prompts(request_id: str, count: int) -> list[str]:
    """Returns one id per prompt; `request_id` stays the name of them all."""
    return [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]


def check_places(
    server: state.ServerState,
    num_choices: int,
    num_prompts: int = 1,
    field_names: Mapping[str, str] | None = None,
) -> None:
    """Raises for more choices than one request may have, or than the engine has places for.

    Routes call this first, when nothing has been tokenised or built yet.
    """
    try:
        check_choices(server, num_choices, num_prompts)
        server.engine.check_places(num_choices, num_prompts)
    except errors.RequestError as error:
        raise bodies.renamed(error, field_names or {}) from None


def check_choices(server: state.ServerState, num_choices: int, num_prompts: int = 1) -> None:
    """Raises for more choices, or images, than this server takes in one request."""
    limit = server.server_config.max_choices_per_request
    if num_choices > limit:
        raise errors.RequestError(
            f"{errors.described_choices(num_choices, num_prompts)} is too much for one "
            f"request: this server takes {limit} (--max-choices-per-request)",
            param="n" if num_prompts == 1 else "prompt",
        )


async def stream(
    server: state.ServerState, prompt_list: PromptList
) -> AsyncGenerator[generations.Generation, None]:
    """Yields the generations of all prompts as they come; errors name the body's fields.

    An answer that ends by a fault raises `GenerationFault`.
    """
    arrival_s = time.monotonic()
    trackers: dict[tuple[int, int], metrics.Tracker] = {}
    num_choices = sum(one.n for one in prompt_list.params)
    check_places(server, num_choices, len(prompt_list.prompts), prompt_list.field_names)
    if not prompt_list.shows_frames and any(one.shows_steps for one in prompt_list.params):
        raise errors.RequestError(
            "stream_mode=denoise shows the steps of a stream: it needs stream=true, on "
            "/v1/chat/completions or /v1/completions",
            param="dllm.stream_mode",
        )
    try:
        if prompt_list.is_prompt_only:
            events = _prompt_only(server, prompt_list, arrival_s)
        else:
            events = server.engine.stream(
                prompt_list.prompts,
                prompt_list.params,
                request_ids=prompt_list.request_ids,
                suffix=prompt_list.suffix_ids,
                priority=prompt_list.priority,
            )
        counts = [one.n for one in prompt_list.params]
        events = server.live.watch(events, prompt_list.request_ids, counts)
        async with contextlib.aclosing(events):
            async for generation in events:
                place = (generation.prompt_index, generation.index)
                if place not in trackers:
                    trackers[place] = metrics.Tracker(server.metrics, arrival_s)
                trackers[place].see(generation)
                _raise_fault(server, generation.finish_reason)
                yield generation
    except errors.RequestError as error:
        raise bodies.renamed(error, prompt_list.field_names) from None


def _raise_fault(server: state.ServerState, finish: Mapping[str, Any] | None) -> None:
    """Raises if an answer has ended by a fault or by the shutdown, and not by its client.

    As in SGLang and vLLM, such an answer is no answer, on every route: the status is 500 with a
    message that says what happened, or a stream ends with an error frame. The other prompts and
    choices of the request are given up. An abort that a client asked for is an answer, with
    `finish_reason` "abort" and the text so far.
    """
    if finish is None or finish["type"] != "abort":
        return
    if "status_code" in finish:  # as in SGLang, only a fault has one
        raise responses.GenerationFault(f"the request ended by a fault: {finish['message']}")
    if server.phase == "draining":
        raise errors.EngineStopped("the server shut down before this request ended")


async def _prompt_only(
    server: state.ServerState, prompt_list: PromptList, arrival_s: float
) -> AsyncGenerator[generations.Generation, None]:
    """Yields the end of every choice without any work of the engine."""
    engine_requests.priority_class(prompt_list.priority, server.engine.config)  # or it is refused
    limit = server.engine.context_length
    for prompt_ids in prompt_list.prompts:
        count = len(prompt_ids) + len(prompt_list.suffix_ids)
        if count > limit:
            raise errors.RequestTooLong(
                f"{errors.maximum_context(limit)}, but the prompt has {count}; shorten it",
                param="prompt",
            )
    rows = zip(prompt_list.prompts, prompt_list.params, prompt_list.request_ids, strict=True)
    for i, (prompt_ids, params, request_id) in enumerate(rows):
        count = len(prompt_ids) + len(prompt_list.suffix_ids)
        for index in range(params.n):
            name = engine_requests.choice_id(request_id, params.n, index)
            latency_s = time.monotonic() - arrival_s
            yield generations.prompt_only(name, (i, index), count, params, latency_s)


async def collect(
    server: state.ServerState, prompt_list: PromptList
) -> list[generations.Generation]:
    """Returns the last generation of every choice, ordered by prompt and choice.

    If a replica is lost on the way, all of it runs once more: nothing has been sent yet.
    """
    try:
        return await _collect_once(server, prompt_list)
    except errors.ReplicaLost:
        return await _collect_once(server, prompt_list)


async def _collect_once(
    server: state.ServerState, prompt_list: PromptList
) -> list[generations.Generation]:
    last: dict[int, generations.Generation] = {}
    async with contextlib.aclosing(stream(server, prompt_list)) as events:
        async for generation in events:
            last[prompt_list.choice_index(generation)] = generation
    return [last[index] for index in sorted(last)]


async def unless_client_leaves(
    request: requests.Request, work: Coroutine[Any, Any, Result]
) -> Result:
    """Returns the result of `work`, or cancels it if the client disconnects first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise requests.ClientDisconnect
    finally:
        await cancel(task, gone)


async def client_gone(receive: asgi.Receive) -> None:
    """Returns once the client has disconnected; call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until their clean-up has run."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
