"""Puts the HTTP app together: routes, error answers, middleware."""

from __future__ import annotations

import fastapi
from starlette.middleware import cors

from jdllm.server import admin, chat, completions, health, middleware, native, responses, state

ROUTERS = (health.router, chat.router, completions.router, native.router, admin.router)


def create_app(server: state.ServerState) -> fastapi.FastAPI:
    """Returns the ASGI app around `server`; the engine may arrive later."""
    # A redirect for a trailing slash would drop the body; the path is right or it is 404.
    app = fastapi.FastAPI(title="jdllm", redirect_slashes=False)
    app.state.server = server
    for router in ROUTERS:
        app.include_router(router)
    methods: dict[str, set[str]] = {}
    for route in (route for router in ROUTERS for route in router.routes):
        methods.setdefault(route.path, set()).update(route.methods)
    responses.install_handlers(app, methods)
    # The one added last is outermost.
    server_config = server.server_config
    app.add_middleware(middleware.LimitBody, max_bytes=server_config.max_body_bytes)
    app.add_middleware(middleware.Gate, server=server)
    app.add_middleware(middleware.Authenticate, server_config=server_config)
    app.add_middleware(responses.CatchFaults)
    origins = server_config.cors_origins()
    if origins:
        # Outside the keys: a preflight bears none, and a page must be able to read a 401.
        app.add_middleware(
            cors.CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(middleware.Count, server=server, paths=methods)
    return app
