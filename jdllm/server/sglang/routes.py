"""SGLang's native routes: /generate with text or ids, and the tokenizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors, value_checks
from jdllm.foreign import neutral_values
from jdllm.host import offload
from jdllm.options import sampling_params
from jdllm.server import prompts, running, sse, state
from jdllm.server.edge import bodies, responses, schemas, token_logprobs
from jdllm.server.openai import chat
from jdllm.server.sglang.requests import DetokenizeRequest, GenerateRequest, TokenizeRequest

if TYPE_CHECKING:
    from jdllm.engine import generations

router = fastapi.APIRouter()

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
LIMITS = ("max_new_tokens", "max_tokens")
MAX_DETOKENIZED = 1 << 20
# Checking the options of a prompt takes about as long as tokenising so many characters.
SIZE_OF_OPTIONS = 50


@router.post("/generate", openapi_extra=schemas.body(GenerateRequest))
@router.put("/generate", include_in_schema=False)
async def generate(request: requests.Request) -> starlette_responses.Response:
    """Generates from one prompt and returns an object, or from a list and returns a list."""
    server = state.of(request)
    body = await bodies.read(request, GenerateRequest)
    given, name, is_list = _prompts(body)
    count = len(given)
    options = _sampling_options(body.sampling_params, count)
    names = _field_names(name, options)
    is_prompt_only = _is_prompt_only(options, names["max_new_tokens"])
    running.check_places(server, _num_choices(options, count), count, names)
    extras = {
        "return_logprob": body.return_logprob,
        "top_logprobs": body.top_logprobs_num,
        "return_step_map": body.return_step_map,
    }
    extras = {name: value for name, value in extras.items() if value is not None}
    special = body.add_special_tokens is not False
    ids = await prompts.all_ids(server, given, name, add_special_tokens=special)
    lengths = [len(one) for one in ids]
    size = len(options) * SIZE_OF_OPTIONS
    params = await offload.off_loop(size, _params, server, lengths, options, extras)
    if is_prompt_only and any(one.return_logprob for one in params):
        raise bodies.no_likelihood("return_logprob")
    prompt_list = running.PromptList(
        prompts=ids,
        params=params,
        request_ids=_request_ids(body, count),
        field_names=names,
        priority=body.priority,
        is_prompt_only=is_prompt_only,
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


def _prompts(body: GenerateRequest) -> tuple[list[str | list[int]], str, bool]:
    """Returns the prompts, the name of their field, and whether it held a list."""
    if (body.text is None) == (body.input_ids is None):
        raise errors.RequestError("give exactly one of text and input_ids", param="text")
    if body.text is not None:
        value, name = body.text, "text"
        is_one = isinstance(value, str)
        is_many = isinstance(value, list) and set(map(type, value)) == {str}
    else:
        name = "input_ids"
        one, many = bodies.token_ids(body.input_ids), bodies.rows_of_ids(body.input_ids)
        value: Any = many if one is None else one
        is_one, is_many = one is not None, many is not None
    if is_one:
        return [value], name, False
    if is_many:
        return value, name, True
    kind = "a string or a list of strings" if name == "text" else "token ids or a list of them"
    raise errors.RequestError(f"{name} must be {kind}, and not empty", param=name)


def _sampling_options(value: Any, count: int) -> list[dict[str, Any]]:
    """Returns one object per prompt, or a single one for all."""
    options = value if isinstance(value, list) else [{} if value is None else value]
    if isinstance(value, list) and len(options) != count:
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


def _num_choices(options: Sequence[dict[str, Any]], num_prompts: int) -> int:
    """Returns how many choices are asked for; a wrong `n` counts as 1 and is refused later."""
    asked = (value_checks.whole(one.get("n")) for one in options)
    total = sum(n if isinstance(n, int) and n > 1 else 1 for n in asked)
    return total if len(options) == num_prompts else total * num_prompts


def _is_prompt_only(options: Sequence[dict[str, Any]], name: str) -> bool:
    """Says whether no token is to be written (a limit of 0): tokens are counted, nothing runs."""
    asking = {_writes_nothing(one) for one in options}
    if len(asking) > 1:
        raise errors.RequestError(f"{name}: give 0 for all prompts or for none", param=name)
    return asking == {True}


def _writes_nothing(options: dict[str, Any]) -> bool:
    limits = _limits(options)
    return bool(limits) and all(type(limit) is int and limit == 0 for limit in limits)


def _limits(options: dict[str, Any]) -> list[Any]:
    """Returns the limits of the output that are given; whether they agree is checked later."""
    given = (value_checks.whole(options.get(name)) for name in LIMITS)
    return [one for one in given if not (one is None or neutral_values.is_empty(one))]


def _params(
    server: state.ServerState,
    prompt_lengths: Sequence[int],
    options: Sequence[dict[str, Any]],
    extras: dict[str, Any],
) -> list[sampling_params.SamplingParams]:
    """Returns the options of each prompt; prompts with the same options and limit share them."""
    made: dict[tuple[int, int], sampling_params.SamplingParams] = {}
    params = []
    for i, prompt_len in enumerate(prompt_lengths):
        place = i if len(options) > 1 else 0
        default = prompts.default_tokens(server, prompt_len, DEFAULT_MAX_NEW_TOKENS)
        if (place, default) not in made:
            one = extras | options[place]
            if not _limits(one) or _writes_nothing(one):
                one |= {"max_new_tokens": default, "max_tokens": None}
            made[place, default] = bodies.sampling_from(one)
        params.append(made[place, default])
    return params


def _field_names(prompt_field: str, options: Sequence[dict[str, Any]]) -> dict[str, str]:
    given = {name for one in options for name, value in one.items() if value is not None}
    is_openai = "max_tokens" in given and "max_new_tokens" not in given
    limit = "max_tokens" if is_openai else "max_new_tokens"
    return {"prompt": prompt_field, "input_ids": prompt_field, "max_new_tokens": limit}


def _request_ids(body: GenerateRequest, count: int) -> list[str]:
    rid = body.rid
    if rid is None:
        return running.ids_of_prompts(running.new_request_id("gen"), count)
    if isinstance(rid, str):
        bodies.check_rid(rid)
        return running.ids_of_prompts(rid, count)
    is_list = isinstance(rid, list) and set(map(type, rid)) == {str}
    if is_list and len(rid) == count == len(set(rid)):
        for one in rid:
            bodies.check_rid(one)
        return rid
    raise errors.RequestError(
        f"rid must be a non-empty string or a list of {count} different ones", param="rid"
    )


@router.post("/tokenize", openapi_extra=schemas.body(TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: requests.Request) -> starlette_responses.Response:
    """Returns the ids of a prompt, of several prompts, or of a conversation."""
    server = state.of(request)
    body = await bodies.read(request, TokenizeRequest)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise errors.RequestError("give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = await chat.template_ids(
            server,
            body.messages,
            body.chat_template_kwargs,
            tools=body.listed_tools,
            add_generation_prompt=body.writes_generation_prompt,
            continue_final_message=body.continue_final_message is True,
            add_special_tokens=body.add_special_tokens is True,
            escape_special_tokens=body.escape_special_tokens,
        )
        return await _tokens(server, ids, len(ids), body.return_token_strs)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(texts, list) or not set(map(type, texts)) <= {str}:
        raise errors.RequestError("prompt must be a string or a list of strings", param="prompt")
    limit = server.server_config.max_choices_per_request
    if len(texts) > limit or max(map(len, texts), default=0) > prompts.MAX_CHARACTERS:
        raise errors.RequestError(
            f"prompt may have {limit} texts (--max-choices-per-request), each of at most "
            f"{prompts.MAX_CHARACTERS} characters",
            param="prompt",
        )
    special = body.add_special_tokens is not False
    encode = functools.partial(server.tokenizer.encode, add_special_tokens=special)
    each = await prompts.mapped(encode, texts)
    if isinstance(body.prompt, str):
        return await _tokens(server, each[0], len(each[0]), body.return_token_strs)
    return await _tokens(server, each, [len(ids) for ids in each], body.return_token_strs)


async def _tokens(
    server: state.ServerState, tokens: Any, count: Any, has_strings: bool | None
) -> starlette_responses.Response:
    content = {"tokens": tokens, "count": count, "max_model_len": server.engine.context_length}
    size = count if isinstance(count, int) else sum(count)
    if has_strings:
        names = server.tokenizer.token_strings
        is_one = isinstance(count, int)
        content["token_strs"] = await offload.off_loop(
            size, lambda: names(tokens) if is_one else [names(ids) for ids in tokens]
        )
    return await offload.off_loop(size, responses.json_response, content)


@router.post("/detokenize", openapi_extra=schemas.body(DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: requests.Request) -> starlette_responses.Response:
    """Returns the text of ids."""
    server = state.of(request)
    body = await bodies.read(request, DetokenizeRequest)
    server.check_model(body.model)
    tokens = bodies.token_ids(body.tokens)
    if tokens is None or len(tokens) > MAX_DETOKENIZED:
        raise errors.RequestError(
            f"tokens must be a list of 1 to {MAX_DETOKENIZED} token ids", param="tokens"
        )
    ids = prompts.checked_ids(server, tokens, "tokens")
    skip = body.skip_special_tokens is not False
    decode = functools.partial(server.tokenizer.decode, skip_special_tokens=skip)
    return responses.json_response({"text": await offload.off_loop(len(ids), decode, ids)})
