"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.server import openai_format, protocol, running, schemas, state, token_logprobs

if TYPE_CHECKING:
    from jdllm.engine import generations, tokenizer

router = fastapi.APIRouter()

# Options of `apply_chat_template` that only the server sets. A template from a request would be
# code that the server runs.
RESERVED_TEMPLATE_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@router.post("/v1/chat/completions", openapi_extra=schemas.body(protocol.ChatRequest))
async def chat_completions(request: requests.Request) -> starlette_responses.Response:
    """Answers a conversation."""
    server = state.of(request)
    body = await protocol.read(request, protocol.ChatRequest)
    server.check_model(body.model)
    prompt_ids = await template_ids(server.tokenizer, body.messages, body.chat_template_kwargs)
    remaining = max(1, server.engine.default_max_new_tokens(len(prompt_ids)))
    answer_id = body.rid or running.new_request_id("chatcmpl")
    prompt_list = running.PromptList(
        prompts=[prompt_ids],
        params=[body.sampling(remaining)],
        request_ids=[answer_id],
        field_names=body.field_names(),
    )
    answer = openai_format.Answer(
        server=server, shape=SHAPE, prompt_list=prompt_list, answer_id=answer_id, body=body
    )
    return await answer.respond(request)


async def template_ids(
    tokenizer: tokenizer.Tokenizer,
    messages: Sequence[protocol.Message],
    options: Mapping[str, Any] | None,
) -> list[int]:
    """Returns the ids of a conversation, followed by the generation prompt."""
    if not tokenizer.has_chat_template:
        raise errors.RequestError(
            "this model has no chat template; start the server with --chat-template",
            param="messages",
        )
    for name in options or {}:
        if name in RESERVED_TEMPLATE_OPTIONS:
            raise errors.RequestError(
                f"{name!r} is set by the server", param=f"chat_template_kwargs.{name}"
            )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    size = sum(len(turn["content"]) for turn in turns)
    apply = tokenizer.apply_chat_template
    return await running.off_loop(size, lambda: apply(turns, **(options or {})))


def _choice(index: int, generation: generations.Generation) -> openai_format.Choice:
    return {
        "index": index,
        "message": {"role": "assistant", "content": generation.text},
        "logprobs": None,
        **openai_format.ending(generation),
    }


def _chunk_choices(
    index: int, generation: generations.Generation, is_first: bool
) -> list[openai_format.Choice]:
    deltas: list[dict[str, str]] = []
    if is_first:
        deltas.append({"role": "assistant", "content": ""})
    if generation.delta_text:
        deltas.append({"content": generation.delta_text})
    running_on = {"finish_reason": None, "matched_stop": None}
    choices = [{"index": index, "delta": d, "logprobs": None, **running_on} for d in deltas]
    if generation.finish_reason is not None:
        end = openai_format.ending(generation)
        choices.append({"index": index, "delta": {}, "logprobs": None, **end})
    return choices


SHAPE = openai_format.Shape(
    object_name="chat.completion",
    chunk_object_name="chat.completion.chunk",
    choice=_choice,
    chunk_choices=_chunk_choices,
    logprobs=token_logprobs.of_chat,
)
