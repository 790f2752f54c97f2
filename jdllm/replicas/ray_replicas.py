"""The replicas of a deployment of Ray Serve, as the ingress sees them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import exceptions as ray_exceptions  # pyright: ignore[reportMissingImports]
from ray.serve import exceptions as serve_exceptions  # pyright: ignore[reportMissingImports]
from ray.serve import handle as serve_handle  # pyright: ignore[reportMissingImports]

from jdllm.replicas import messages, running_names

# What says that a replica is gone or cannot be reached. Errors of requests are no exceptions here:
# `EngineHost.stream` sends them as items.
LOST = (ray_exceptions.RayError, serve_exceptions.RayServeException)


class RayReplicas:
    """Obeys `messages.Replicas` by a handle whose router is `ray_router.TargetRouter`."""

    def __init__(self, engines: serve_handle.DeploymentHandle):
        self._engines = engines
        self._key = (engines.app_name, engines.deployment_name)

    def names(self) -> Sequence[str]:
        return running_names.RUNNING.get(self._key, ())

    async def stream(self, name: str, call: messages.Call) -> AsyncGenerator[messages.Item, None]:
        response = self._engines.options(stream=True).stream.remote(call, target=name)
        has_ended = False
        try:
            async for item in response:
                yield item
            has_ended = True
        except LOST as error:
            has_ended = True
            raise messages.Lost(_line(error)) from error
        finally:
            if not has_ended:
                response.cancel()

    async def facts(self) -> messages.Facts:
        return await self._ask("facts")

    async def report(self, name: str) -> messages.Report:
        return await self._ask("report", target=name)

    async def abort(self, name: str, request_ids: Sequence[str], *, abort_all: bool) -> int:
        return await self._ask("abort", list(request_ids), abort_all=abort_all, target=name)

    async def flush_cache(self, name: str) -> bool:
        return await self._ask("flush_cache", target=name)

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        response = self._engines.options(method_name=method).remote(*arguments, **options)
        try:
            return await response
        except LOST as error:
            raise messages.Lost(_line(error)) from error
        finally:
            with contextlib.suppress(*LOST):
                response.cancel()  # a caller that gave up waiting; nothing, once it has ended


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
