"""POST /v1/completions: continues a text or ids, or a list of them; `suffix` asks for infilling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm.server import prompts, running, state
from jdllm.server.edge import bodies, schemas, token_logprobs
from jdllm.server.openai import answer as openai_format
from jdllm.server.openai.answer import Answer, Choice, Shape
from jdllm.server.openai.requests import CompletionRequest

if TYPE_CHECKING:
    from jdllm.engine import generations

router = fastapi.APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", openapi_extra=schemas.body(CompletionRequest))
async def completions(request: requests.Request) -> starlette_responses.Response:
    """Continues one or more prompts, or writes the text between each prompt and a suffix."""
    server = state.of(request)
    body = await bodies.read(request, CompletionRequest)
    server.check_model(body.model)
    given = prompts.split(body.prompt)
    names = body.field_names()
    running.check_places(server, len(given) * max(1, body.n or 1), len(given), names)
    special = body.add_special_tokens is not False
    ids = await prompts.all_ids(server, given, "prompt", add_special_tokens=special)
    suffix = await prompts.suffix_ids(server, body.suffix)
    answer_id = body.rid or running.new_request_id("cmpl")
    # Most prompts leave room for the same number of tokens, and then share their options.
    params = functools.cache(body.sampling)
    room = functools.partial(prompts.default_tokens, server, default=DEFAULT_MAX_TOKENS)
    prompt_list = running.PromptList(
        prompts=ids,
        params=[params(room(len(one) + len(suffix))) for one in ids],
        request_ids=running.ids_of_prompts(answer_id, len(ids)),
        field_names=names,
        priority=body.priority,
        suffix_ids=suffix,
        is_prompt_only=body.is_prompt_only,
        shows_frames=body.stream is True,
    )
    shape = SHAPE
    if body.echo:
        skips = body.skip_special_tokens is not False
        shape = _echoing(await prompts.texts(server, given, skip_special_tokens=skips))
    answer = Answer(
        server=server, shape=shape, prompt_list=prompt_list, answer_id=answer_id, body=body
    )
    return await answer.respond(request)


def _echoing(texts: Sequence[str]) -> Shape:
    """Returns a shape whose outputs begin with the texts of their prompts."""

    def choice(index: int, generation: generations.Generation) -> Choice:
        plain = _choice(index, generation)
        return plain | {"text": texts[generation.prompt_index] + plain["text"]}

    def chunk_choices(
        index: int, generation: generations.Generation, is_first: bool
    ) -> list[Choice]:
        chunks = _chunk_choices(index, generation, is_first)
        if is_first:
            chunks[0]["text"] = texts[generation.prompt_index] + chunks[0]["text"]
        return chunks

    return dataclasses.replace(SHAPE, choice=choice, chunk_choices=chunk_choices)


def _choice(index: int, generation: generations.Generation) -> Choice:
    return {
        "index": index,
        "text": generation.text,
        "logprobs": None,
        **openai_format.ending(generation),
    }


def _chunk_choices(index: int, generation: generations.Generation, is_first: bool) -> list[Choice]:
    if not generation.delta_text and generation.finish_reason is None and not is_first:
        return []
    text = generation.delta_text
    return [{"index": index, "text": text, "logprobs": None, **openai_format.ending(generation)}]


SHAPE = Shape(
    object_name="text_completion",
    chunk_object_name="text_completion",
    choice=_choice,
    chunk_choices=_chunk_choices,
    logprobs=token_logprobs.of_completion,
)
