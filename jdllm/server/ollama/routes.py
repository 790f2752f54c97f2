"""Ollama's routes, for clients that speak nothing else.

Only what asks and answers is here. Routes that pull, push, create or delete models are not: the
server has the one model that it was started with.
"""

from __future__ import annotations

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors, version
from jdllm.server import prompts, running, sse, state
from jdllm.server.edge import bodies, responses, schemas
from jdllm.server.ollama import answer, model_cards
from jdllm.server.ollama.answer import Form, Kind
from jdllm.server.ollama.request import (
    FIELD_NAMES,
    ChatRequest,
    GenerateRequest,
    Request,
    ShowRequest,
)
from jdllm.server.openai import chat

router = fastapi.APIRouter()


@router.post("/api/chat", openapi_extra=schemas.body(ChatRequest))
async def ollama_chat(request: requests.Request) -> starlette_responses.Response:
    """Answers a conversation, by default as a stream of lines."""
    server = state.of(request)
    body = await bodies.read(request, ChatRequest)
    form = _form(server, body, "chat")
    if not body.messages:
        return _loaded(body, form)
    running.check_places(server, 1)
    prompt_ids = await _chat_ids(server, body)
    prompt_list = _prompt_list(server, body, prompt_ids, "messages")
    return await _respond(request, server, body, form, prompt_list)


@router.post("/api/generate", openapi_extra=schemas.body(GenerateRequest))
async def ollama_generate(request: requests.Request) -> starlette_responses.Response:
    """Answers a question, continues a text (`raw`), or writes what stands before `suffix`."""
    server = state.of(request)
    body = await bodies.read(request, GenerateRequest)
    form = _form(server, body, "generate")
    if not body.prompt:
        return _loaded(body, form)
    running.check_places(server, 1)
    suffix = await prompts.suffix_ids(server, body.suffix)
    if body.is_plain:
        special = body.add_special_tokens is not False
        prompt_ids = await prompts.ids(server, body.prompt, "prompt", add_special_tokens=special)
    else:
        prompt_ids = await _chat_ids(server, body)
    prompt_list = _prompt_list(server, body, prompt_ids, "prompt", suffix)
    return await _respond(request, server, body, form, prompt_list)


async def _chat_ids(server: state.ServerState, body: ChatRequest | GenerateRequest) -> list[int]:
    return await chat.template_ids(
        server,
        body.chat_messages,
        None,
        add_special_tokens=body.add_special_tokens is True,
        escape_special_tokens=body.escape_special_tokens,
    )


def _form(server: state.ServerState, body: Request, kind: Kind) -> Form:
    """Returns the form of the answer, having checked which model is asked."""
    server.check_model(body.model_name())
    return Form(kind=kind, model=body.model or model_cards.tagged_name(server))


def _prompt_list(
    server: state.ServerState,
    body: Request,
    prompt_ids: list[int],
    prompt_field: str,
    suffix: list[int] | None = None,
) -> running.PromptList:
    suffix = suffix or []
    remaining = server.engine.default_max_new_tokens(len(prompt_ids) + len(suffix))
    prompt_names = {"prompt": prompt_field, "input_ids": prompt_field}
    return running.PromptList(
        prompts=[prompt_ids],
        params=[body.sampling(remaining)],
        request_ids=[running.new_request_id("ollama")],
        field_names=FIELD_NAMES | prompt_names,
        suffix_ids=suffix,
    )


async def _respond(
    request: requests.Request,
    server: state.ServerState,
    body: Request,
    form: Form,
    prompt_list: running.PromptList,
) -> starlette_responses.Response:
    if body.stream is not False:
        return sse.EventStream(
            form.lines(running.stream(server, prompt_list)),
            ping_interval_s=server.ping_interval_s,
            framing=answer.FRAMING,
        )
    work = running.collect(server, prompt_list)
    (final,) = await running.unless_client_leaves(request, work)
    return responses.json_response(form.whole(final))


def _loaded(body: Request, form: Form) -> starlette_responses.Response:
    """Answers a request without a prompt, which asks to load the model, or to unload it."""
    if body.keep_alive in (0, "0", "0s", "0m", "0h"):
        raise errors.RequestError("keep_alive: this server keeps its model", param="keep_alive")
    return responses.json_response(form.loaded())


@router.get("/api/tags")
async def ollama_tags(request: requests.Request) -> starlette_responses.Response:
    """Lists the model that is served."""
    return responses.json_response({"models": [model_cards.listed(state.of(request))]})


@router.get("/api/ps")
async def ollama_ps(request: requests.Request) -> starlette_responses.Response:
    """Lists the model as one that is loaded."""
    return responses.json_response({"models": [model_cards.loaded(state.of(request))]})


@router.get("/api/version")
async def ollama_version() -> starlette_responses.Response:
    """Returns the version of Ollama's API that these routes speak, and the server's own."""
    return responses.json_response(
        {"version": model_cards.API_VERSION, "jdllm": version.__version__}
    )


@router.post("/api/show", openapi_extra=schemas.body(ShowRequest))
async def ollama_show(request: requests.Request) -> starlette_responses.Response:
    """Describes the model that is served; 404 for any other name."""
    server = state.of(request)
    body = await bodies.read(request, ShowRequest)
    name = body.model or body.name
    if name is None:
        raise errors.RequestError("model is required", param="model")
    if name.removesuffix(":latest") != server.engine.model_name:
        raise state.model_not_found(name)
    return responses.json_response(model_cards.shown(server))
