"""SGLang's native routes: /generate with text or ids, and the tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors, sampling_params
from jdllm.server import (
    chat,
    completions,
    protocol,
    responses,
    running,
    schemas,
    sse,
    state,
    token_logprobs,
)

if TYPE_CHECKING:
    from jdllm.engine import generations

router = fastapi.APIRouter()

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


@router.post("/generate", openapi_extra=schemas.body(protocol.GenerateRequest))
@router.put("/generate", include_in_schema=False)
async def generate(request: requests.Request) -> starlette_responses.Response:
    """Generates from one prompt and returns an object, or from a list and returns a list."""
    server = state.of(request)
    body = await protocol.read(request, protocol.GenerateRequest)
    prompts, name, is_list = _prompts(body)
    options = _sampling_options(body.sampling_params, len(prompts))
    extras = {
        "return_logprob": body.return_logprob,
        "top_logprobs": body.top_logprobs_num,
        "return_step_map": body.return_step_map,
    }
    extras = {name: value for name, value in extras.items() if value is not None}
    options = [extras | one for one in options]
    ids = [await completions.prompt_ids(server, prompt, name) for prompt in prompts]
    prompt_list = running.PromptList(
        prompts=ids,
        params=[_params(server, i, one) for i, one in zip(ids, options, strict=True)],
        request_ids=_request_ids(body, len(prompts)),
        field_names=_field_names(name, options),
    )
    is_list = is_list or prompt_list.params[0].n > 1

    def shown(generation: generations.Generation) -> dict[str, Any]:
        reply = generation.as_dict()
        if not body.return_text_in_logprobs:
            return reply
        return token_logprobs.with_texts(reply, server.token_texts)

    if body.stream:
        frames = _frames(server, prompt_list, is_list, shown)
        return sse.EventStream(frames, ping_interval_s=server.ping_interval_s)
    finals = await running.unless_client_leaves(request, running.collect(server, prompt_list))
    replies = [shown(generation) for generation in finals]
    return responses.json_response(replies if is_list else replies[0])


async def _frames(
    server: state.ServerState,
    prompt_list: running.PromptList,
    is_list: bool,
    shown: Callable[[generations.Generation], dict[str, Any]],
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(running.stream(server, prompt_list)) as events:
        async for generation in events:
            reply = shown(generation)
            if is_list:
                reply["index"] = prompt_list.choice_index(generation)
            yield sse.frame(reply)


def _prompts(body: protocol.GenerateRequest) -> tuple[list[str | list[int]], str, bool]:
    """Returns the prompts, the name of their field, and whether it held a list."""
    if (body.text is None) == (body.input_ids is None):
        raise errors.RequestError("give exactly one of text and input_ids", param="text")
    if body.text is not None:
        value, name = body.text, "text"
        is_one = isinstance(value, str)
        is_many = isinstance(value, list) and all(isinstance(item, str) for item in value)
    else:
        value, name = body.input_ids, "input_ids"
        is_one = protocol.is_ids(value)
        is_many = isinstance(value, list) and all(protocol.is_ids(item) for item in value)
    if is_one:
        return [value], name, False
    if is_many and value:
        return value, name, True
    kind = "a string or a list of strings" if name == "text" else "token ids or a list of them"
    raise errors.RequestError(f"{name} must be {kind}, and not empty", param=name)


def _sampling_options(value: Any, count: int) -> list[dict[str, Any]]:
    """Returns one object per prompt; `value` is one object for all prompts, or a list."""
    options = value if isinstance(value, list) else [{} if value is None else value] * count
    if len(options) != count:
        raise errors.RequestError(
            f"sampling_params has {len(options)} entries for {count} prompts",
            param="sampling_params",
        )
    for entry in options:
        if not isinstance(entry, dict):
            raise errors.RequestError(
                f"sampling_params must be an object, got {type(entry).__name__}",
                param="sampling_params",
            )
    return options


def _params(
    server: state.ServerState, prompt_ids: list[int], options: dict[str, Any]
) -> sampling_params.SamplingParams:
    if options.get("max_new_tokens") is None and options.get("max_tokens") is None:
        default = completions.default_tokens(server, len(prompt_ids), DEFAULT_MAX_NEW_TOKENS)
        options = options | {"max_new_tokens": default}
    return protocol.sampling_from(options)


def _field_names(prompt_field: str, options: Sequence[dict[str, Any]]) -> dict[str, str]:
    given = {name for one in options for name, value in one.items() if value is not None}
    is_openai = "max_tokens" in given and "max_new_tokens" not in given
    limit = "max_tokens" if is_openai else "max_new_tokens"
    return {"prompt": prompt_field, "input_ids": prompt_field, "max_new_tokens": limit}


def _request_ids(body: protocol.GenerateRequest, count: int) -> list[str]:
    rid = body.rid
    if rid is None:
        return running.ids_of_prompts(running.new_request_id("gen"), count)
    if isinstance(rid, str) and rid:
        return running.ids_of_prompts(rid, count)
    if (
        isinstance(rid, list)
        and len(rid) == count == len(set(map(str, rid)))
        and all(isinstance(item, str) and item for item in rid)
    ):
        return rid
    raise errors.RequestError(
        f"rid must be a non-empty string or a list of {count} different ones", param="rid"
    )


@router.post("/tokenize", openapi_extra=schemas.body(protocol.TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: requests.Request) -> starlette_responses.Response:
    """Returns the ids of a prompt, of several prompts, or of a conversation."""
    server = state.of(request)
    body = await protocol.read(request, protocol.TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise errors.RequestError("give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = await chat.template_ids(server.tokenizer, body.messages, body.chat_template_kwargs)
        return _tokens(server, ids, len(ids))
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise errors.RequestError("prompt must be a string or a list of strings", param="prompt")
    special = body.add_special_tokens is not False
    encode = server.tokenizer.encode
    each = [
        await running.off_loop(len(t), lambda t=t: encode(t, add_special_tokens=special))
        for t in texts
    ]
    if isinstance(body.prompt, str):
        return _tokens(server, each[0], len(each[0]))
    return _tokens(server, each, [len(ids) for ids in each])


def _tokens(server: state.ServerState, tokens: Any, count: Any) -> starlette_responses.Response:
    return responses.json_response(
        {"tokens": tokens, "count": count, "max_model_len": server.engine.context_length}
    )


@router.post("/detokenize", openapi_extra=schemas.body(protocol.DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: requests.Request) -> starlette_responses.Response:
    """Returns the text of ids."""
    server = state.of(request)
    body = await protocol.read(request, protocol.DetokenizeRequest)
    if not protocol.is_ids(body.tokens):
        raise errors.RequestError("tokens must be a non-empty list of token ids", param="tokens")
    ids = await completions.prompt_ids(server, body.tokens, "tokens")
    skip = body.skip_special_tokens is not False
    return responses.json_response({"text": server.tokenizer.decode(ids, skip_special_tokens=skip)})
