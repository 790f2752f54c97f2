"""Puts the HTTP app together: routes, error answers, middleware."""

from __future__ import annotations

import fastapi

from jdllm.server import admin, chat, completions, health, middleware, native, responses, state

ROUTERS = (health.router, chat.router, completions.router, native.router, admin.router)


def create_app(server: state.ServerState) -> fastapi.FastAPI:
    """Returns the ASGI app around `server`; the engine may arrive later."""
    # A redirect for a trailing slash would drop the body; the path is right or it is 404.
    app = fastapi.FastAPI(title="jdllm", redirect_slashes=False)
    app.state.server = server
    for router in ROUTERS:
        app.include_router(router)
    responses.install_handlers(app)
    paths = {route.path for router in ROUTERS for route in router.routes}
    # The one added last is outermost.
    server_config = server.server_config
    app.add_middleware(middleware.LimitBody, max_bytes=server_config.max_body_bytes)
    app.add_middleware(middleware.Gate, server=server)
    app.add_middleware(middleware.Authenticate, server_config=server_config)
    app.add_middleware(responses.CatchFaults)
    app.add_middleware(middleware.Count, server=server, paths=paths)
    return app
