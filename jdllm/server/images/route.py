"""POST /v1/images/generations, and GET /v1/images/{id}/content for answers with URLs.

Routes of other servers for what is not built are refused by name.
"""

from __future__ import annotations

import fastapi
from starlette import requests
from starlette import responses as starlette_responses

from jdllm import errors
from jdllm.host import offload
from jdllm.server import running, sse, state
from jdllm.server.edge import bodies, responses, schemas
from jdllm.server.images import events
from jdllm.server.images.answer import Answer
from jdllm.server.images.request import GenerationRequest

router = fastapi.APIRouter()

# Nobody keeps an image beyond its URL, and a browser takes it for nothing but an image.
CONTENT_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}

NOT_BUILT = {
    "/v1/images/edits": "images as inputs",
    "/v1/images/variations": "images as inputs",
    "/v1/videos": "videos",
}


@router.post("/v1/images/generations", openapi_extra=schemas.body(GenerationRequest))
async def create_images(request: requests.Request) -> starlette_responses.Response:
    """Makes images of a prompt, as one object or as a stream of events."""
    server = state.of(request)
    body = await bodies.read(request, GenerationRequest)
    server.check_model(body.model)
    facts = server.images.facts
    answer = Answer(
        server=server,
        body=body,
        call=events.Call(
            requests=body.image_requests(facts),
            rid=body.rid or running.new_request_id("img"),
            priority=body.priority,
            field_names=body.field_names,
        ),
        output_format=body.file_format(facts),
        base_url=str(request.base_url),
    )
    if body.stream:
        return sse.EventStream(answer.frames(), ping_interval_s=server.ping_interval_s)
    content = await running.unless_client_leaves(request, answer.whole())
    size = sum(len(one.get("b64_json", "")) for one in content["data"])
    return await offload.off_loop(size, responses.json_response, content)


@router.get("/v1/images/{image_id}/content")
async def image_content(request: requests.Request, image_id: str) -> starlette_responses.Response:
    """Returns an image that an answer named by its URL; 404 once it has expired."""
    found = state.of(request).image_store.get(image_id)
    if found is None:
        raise responses.NotFound(
            "there is no such image (any more); a URL lasts an hour, or less on a busy server",
            code="not_found",
        )
    return starlette_responses.Response(
        found.content, headers=CONTENT_HEADERS, media_type=found.media_type
    )


async def refuse(request: requests.Request) -> None:
    """Answers 400 and says what is not built, whatever the body is (too large, it is a 413)."""
    path = request.url.path
    raise errors.RequestError(
        f"POST {path} is not built: no model here has {NOT_BUILT[path]}; for images of a prompt "
        "use POST /v1/images/generations",
        code="not_built",
    )


for refused in NOT_BUILT:
    router.add_api_route(refused, refuse, methods=["POST"], include_in_schema=False)
