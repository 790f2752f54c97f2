"""POST /v1/responses: OpenAI's newer API for the same question as a chat; stateless."""

from __future__ import annotations

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.server import running, sse, state
from jdllm.server.edge import bodies, responses, schemas
from jdllm.server.openai import chat
from jdllm.server.openai.responses.answer import Answer, new_id
from jdllm.server.openai.responses.request import ResponseRequest

router = fastapi.APIRouter()


@router.post("/v1/responses", openapi_extra=schemas.body(ResponseRequest))
async def create_response(request: requests.Request) -> starlette_responses.Response:
    """Answers a text or a conversation, as one object or as a stream of events."""
    server = state.of(request)
    body = await bodies.read(request, ResponseRequest)
    server.check_model(body.model)
    names = body.field_names()
    running.check_places(server, 1, field_names=names)
    try:
        prompt_ids = await chat.template_ids(
            server,
            body.messages,
            body.chat_template_kwargs,
            escape_special_tokens=body.escape_special_tokens,
        )
    except errors.RequestError as error:
        # The items of `input` and the messages of the template are not numbered alike.
        name = "input" if (error.param or "").startswith("messages") else error.param
        raise type(error)(str(error), param=name, code=error.code) from error
    remaining = server.engine.default_max_new_tokens(len(prompt_ids))
    answer_id = body.rid or new_id("resp")
    prompt_list = running.PromptList(
        prompts=[prompt_ids],
        params=[body.sampling(remaining)],
        request_ids=[answer_id],
        field_names=names,
        priority=body.priority,
    )
    answer = Answer(server=server, body=body, prompt_list=prompt_list, answer_id=answer_id)
    if body.stream:
        return sse.EventStream(
            answer.frames(), ping_interval_s=server.ping_interval_s, framing=answer.framing()
        )
    work = running.collect(server, prompt_list)
    (final,) = await running.unless_client_leaves(request, work)
    return responses.json_response(answer.response(final))
