"""POST /v1/completions: continues a text or ids, or a list of them; `suffix` asks for infilling."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.server import openai_format, protocol, running, schemas, state, token_logprobs

if TYPE_CHECKING:
    from jdllm.engine import generations

router = fastapi.APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", openapi_extra=schemas.body(protocol.CompletionRequest))
async def completions(request: requests.Request) -> starlette_responses.Response:
    """Continues one or more prompts, or writes the text between each prompt and a suffix."""
    server = state.of(request)
    body = await protocol.read(request, protocol.CompletionRequest)
    server.check_model(body.model)
    prompts = [await prompt_ids(server, prompt, "prompt") for prompt in split_prompt(body.prompt)]
    suffix = await suffix_ids(server, body.suffix)
    answer_id = body.rid or running.new_request_id("cmpl")
    prompt_list = running.PromptList(
        prompts=prompts,
        params=[
            body.sampling(default_tokens(server, len(ids) + len(suffix), DEFAULT_MAX_TOKENS))
            for ids in prompts
        ],
        request_ids=running.ids_of_prompts(answer_id, len(prompts)),
        field_names=body.field_names(),
        suffix_ids=suffix,
    )
    answer = openai_format.Answer(
        server=server, shape=SHAPE, prompt_list=prompt_list, answer_id=answer_id, body=body
    )
    return await answer.respond(request)


def split_prompt(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of a `prompt` field, which is str, [str], [int] or [[int]]."""
    if isinstance(prompt, str) or protocol.is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        all_text = all(isinstance(item, str) for item in prompt)
        if all_text or all(protocol.is_ids(item) for item in prompt):
            return prompt
    raise errors.RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of those, "
        "and not empty",
        param="prompt",
    )


async def prompt_ids(server: state.ServerState, prompt: str | list[int], param: str) -> list[int]:
    """Returns the checked token ids of one prompt."""
    if isinstance(prompt, str):
        prompt = await running.off_loop(len(prompt), server.tokenizer.encode, prompt)
        if not prompt:
            raise errors.RequestError(f"{param} has no tokens", param=param)
    vocab_size = server.engine.spec.vocab_size
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise errors.RequestError(
                f"token id {token_id} is outside the vocabulary of {vocab_size}", param=param
            )
    return prompt


async def suffix_ids(server: state.ServerState, suffix: str | None) -> list[int]:
    """Returns the ids of a suffix, without a token that marks its beginning; [] without one."""
    if not suffix:
        return []
    encode = functools.partial(server.tokenizer.encode, add_special_tokens=False)
    return await running.off_loop(len(suffix), encode, suffix)


def default_tokens(server: state.ServerState, prompt_len: int, default: int) -> int:
    """Returns the default output limit, or what is left of the context if that is less."""
    return max(1, min(default, server.engine.default_max_new_tokens(prompt_len)))


def _choice(index: int, generation: generations.Generation) -> openai_format.Choice:
    return {
        "index": index,
        "text": generation.text,
        "logprobs": None,
        **openai_format.ending(generation),
    }


def _chunk_choices(
    index: int, generation: generations.Generation, is_first: bool
) -> list[openai_format.Choice]:
    if not generation.delta_text and generation.finish_reason is None and not is_first:
        return []
    text = generation.delta_text
    return [{"index": index, "text": text, "logprobs": None, **openai_format.ending(generation)}]


SHAPE = openai_format.Shape(
    object_name="text_completion",
    chunk_object_name="text_completion",
    choice=_choice,
    chunk_choices=_chunk_choices,
    logprobs=token_logprobs.of_completion,
)
