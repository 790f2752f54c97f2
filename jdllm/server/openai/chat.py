"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.host import offload
from jdllm.server import prompts, running, state
from jdllm.server.edge import bodies, schemas, token_logprobs
from jdllm.server.openai import answer as openai_format
from jdllm.server.openai import conversation_fields
from jdllm.server.openai.answer import Answer, Choice, Shape
from jdllm.server.openai.requests import ChatRequest
from jdllm.templates import budget

if TYPE_CHECKING:
    from jdllm.engine import generations

router = fastapi.APIRouter()

# Rendering a message takes about as long as tokenising so many characters.
SIZE_OF_A_TURN = 50


@router.post("/v1/chat/completions", openapi_extra=schemas.body(ChatRequest))
async def chat_completions(request: requests.Request) -> starlette_responses.Response:
    """Answers a conversation."""
    server = state.of(request)
    body = await bodies.read(request, ChatRequest)
    server.check_model(body.model)
    names = body.field_names()
    running.check_places(server, max(1, body.n or 1), field_names=names)
    prompt_ids = await template_ids(
        server,
        body.messages,
        body.chat_template_kwargs,
        add_generation_prompt=body.writes_generation_prompt,
        continue_final_message=body.continue_final_message is True,
        add_special_tokens=body.add_special_tokens is True,
        escape_special_tokens=body.escape_special_tokens,
    )
    remaining = server.engine.default_max_new_tokens(len(prompt_ids))
    answer_id = body.rid or running.new_request_id("chatcmpl")
    prompt_list = running.PromptList(
        prompts=[prompt_ids],
        params=[body.sampling(remaining)],
        request_ids=[answer_id],
        field_names=names,
        priority=body.priority,
        is_prompt_only=body.is_prompt_only,
        shows_frames=body.stream is True,
    )
    answer = Answer(
        server=server, shape=SHAPE, prompt_list=prompt_list, answer_id=answer_id, body=body
    )
    return await answer.respond(request)


async def template_ids(
    server: state.ServerState,
    messages: Sequence[conversation_fields.Message],
    chat_template_kwargs: Mapping[str, Any] | None,
    **layout: Any,
) -> list[int]:
    """Returns the ids of a conversation; `layout` are options of `apply_chat_template`."""
    tokenizer = server.tokenizer
    if not tokenizer.has_chat_template:
        raise errors.RequestError(
            "this model has no chat template; start the server with --chat-template",
            param="messages",
        )
    turns = [message.turn() for message in messages]
    size = budget.text_size([turns, chat_template_kwargs or {}, layout], prompts.MAX_CHARACTERS)
    apply = tokenizer.apply_chat_template
    if size > prompts.MAX_CHARACTERS:
        raise errors.RequestTooLong(
            f"{errors.maximum_context(server.engine.context_length)}, but messages have {size} "
            f"characters, and at most {prompts.MAX_CHARACTERS} are taken; shorten them",
            param="messages",
        )
    size += len(turns) * SIZE_OF_A_TURN
    return await offload.off_loop(
        size, lambda: apply(turns, chat_template_kwargs=chat_template_kwargs, **layout)
    )


def _choice(index: int, generation: generations.Generation) -> Choice:
    return {
        "index": index,
        "message": {"role": "assistant", "content": generation.text},
        "logprobs": None,
        **openai_format.ending(generation),
    }


def _chunk_choices(index: int, generation: generations.Generation, is_first: bool) -> list[Choice]:
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


SHAPE = Shape(
    object_name="chat.completion",
    chunk_object_name="chat.completion.chunk",
    choice=_choice,
    chunk_choices=_chunk_choices,
    logprobs=token_logprobs.of_chat,
)
