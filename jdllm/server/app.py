"""Puts the HTTP app together: routes, error answers, middleware."""

from __future__ import annotations

import fastapi
from fastapi import params
from starlette import routing

from jdllm.server import middleware, state
from jdllm.server.edge import request_forms, responses
from jdllm.server.images import route as images_route
from jdllm.server.ollama import plain_errors
from jdllm.server.ollama import routes as ollama_routes
from jdllm.server.openai import chat, completions
from jdllm.server.openai.responses import route as responses_route
from jdllm.server.operations import admin, docs_page, health, loads
from jdllm.server.playground import page
from jdllm.server.sglang import routes

COMMON_ROUTERS = (health.router, admin.router, loads.router, docs_page.router)
TEXT_ROUTERS = (
    chat.router,
    completions.router,
    responses_route.router,
    routes.router,
    ollama_routes.router,
)
IMAGE_ROUTERS = (images_route.router,)
# All are served whatever the model makes, so that a wrong route can say which is the right one.
ROUTERS = (*COMMON_ROUTERS, *TEXT_ROUTERS, *IMAGE_ROUTERS)


def create_app(server: state.ServerState) -> fastapi.FastAPI:
    """Returns the ASGI app around `server`; the engine may be ready later."""
    # `request_forms` takes a trailing slash; a redirect would drop the body.
    # `docs_page` stands in for FastAPI's pages, which load scripts from other servers, and for its
    # schema, which it makes on the event loop.
    app = fastapi.FastAPI(
        title="jdllm", redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.server = server
    routers = list(ROUTERS)
    if not server.server_config.disable_playground:
        routers.append(page.router())
    for router in routers:
        app.include_router(router, dependencies=_needs(router))
    methods: dict[str, set[str]] = {}
    for route in (route for router in routers for route in router.routes):
        assert isinstance(route, routing.Route), "the routers have plain routes only"
        methods.setdefault(route.path, set()).update(route.methods or ())
    for found in methods.values():
        found |= {"HEAD"} if "GET" in found else set()
    responses.install_handlers(app, methods)
    # The middleware that is added last is the outermost.
    server_config = server.server_config
    max_bytes = server_config.max_body_bytes
    app.add_middleware(request_forms.Decompress, max_bytes=max_bytes)
    app.add_middleware(
        middleware.LimitBody,
        max_bytes=max_bytes,
        timeout_s=server_config.timeout_read_request,
    )
    app.add_middleware(middleware.Gate, server=server)
    app.add_middleware(middleware.Authenticate, server=server)
    app.add_middleware(responses.CatchFaults)
    app.add_middleware(plain_errors.PlainErrors)
    origins = server_config.cors_origins()
    if origins:
        # Outside `Authenticate`: a preflight request has no key, and a page must be able to read
        # a 401.
        app.add_middleware(middleware.Cors, origins=origins)
    app.add_middleware(request_forms.PlainForm)
    app.add_middleware(middleware.Count, server=server, paths=methods)
    return app


def _needs(router: fastapi.APIRouter) -> list[params.Depends]:
    """Returns what is checked before a route of `router` reads a body: what the model makes."""
    if router in TEXT_ROUTERS:
        return [fastapi.Depends(state.needs_text)]
    return [fastapi.Depends(state.needs_images)] if router in IMAGE_ROUTERS else []
