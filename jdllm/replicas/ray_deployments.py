"""The two deployments of an application: engines, and the ingress in front of them.

The ingress holds the HTTP app of `jdllm serve` and no model; it needs no GPU. There is one of it,
so that it knows the load of every replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import fastapi
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve import handle as serve_handle  # pyright: ignore[reportMissingImports]

from jdllm.checkpoint import source
from jdllm.engine import engine as engine_lib
from jdllm.engine import tokenizer
from jdllm.engine.start import startup
from jdllm.options.config import EngineConfig
from jdllm.replicas import engine_host, messages, ray_replicas, replicated_engine
from jdllm.replicas.options import Options
from jdllm.server import app, state
from jdllm.server.edge import log_format

logger = logging.getLogger(__name__)

# Far above what the queues of the engines take, so that their errors are the ones that clients see.
MAX_ONGOING_REQUESTS = 1_000_000
# The ingress asks each replica for a report every second, and jdllm has an access log of its own.
QUIET = {"enable_access_log": False}


class Engine:
    """A replica: one engine in a process of its own. `target` is what the router reads."""

    def __init__(self, config: EngineConfig, drain_timeout_s: float):
        _configure_logging(config)
        self._drain_timeout_s = drain_timeout_s
        self._host: engine_host.EngineHost | None = None
        self._host = engine_host.EngineHost(engine_lib.Engine(config))

    def check_health(self) -> None:
        self._made.check_health()

    async def facts(self) -> messages.Facts:
        return await asyncio.to_thread(self._made.facts)  # it counts for every prompt length

    async def report(self, *, target: str) -> messages.Report:
        del target
        return self._made.report()

    async def stream(self, call: messages.Call, *, target: str) -> Any:
        del target
        events = self._made.stream(call)
        try:
            async for item in events:
                yield item
        finally:
            await events.aclose()

    async def abort(self, request_ids: list[str], *, abort_all: bool, target: str) -> int:
        del target
        return await self._made.abort(request_ids, abort_all=abort_all)

    async def flush_cache(self, *, target: str) -> bool:
        del target
        return await self._made.flush_cache()

    def __del__(self) -> None:
        # Ray Serve calls it once, when the requests have ended or their time is over.
        host, self._host = self._host, None
        if host is not None:
            host.close(self._drain_timeout_s)

    @property
    def _made(self) -> engine_host.EngineHost:
        assert self._host is not None, "Ray Serve sends nothing before __init__ or after __del__"
        return self._host


@serve.ingress()
class Ingress:
    """The HTTP app around replicas."""

    def __init__(self, engines: serve_handle.DeploymentHandle, options: Options):
        _configure_logging(options.engine)
        self._options = options
        self._replicas = ray_replicas.RayReplicas(engines)
        self._server = state.ServerState(
            server_config=options.server, progress=startup.StartupProgress()
        )

    async def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        self._watching = asyncio.create_task(self._watch())
        return app.create_app(self._server)

    async def is_ready(self) -> bool:
        return self._server.phase == "ready"

    async def drain(self, timeout_s: float) -> bool:
        """Refuses requests from now on, and waits for those that run; False if some are left."""
        self._server.phase = "draining"
        engine = self._server.loaded_engine
        if engine is None:
            return True
        engine.stop_admitting()
        return await asyncio.to_thread(engine.drain, timeout_s)

    async def _watch(self) -> None:
        """Opens the app once a replica is ready, and keeps watching the replicas."""
        try:
            engine = await self._connect()
            await engine.poll()
            self._server.loaded_engine = engine
            self._server.progress.enter("ready")
            if self._server.phase == "starting":
                self._server.phase = "ready"
            await engine.watch()
        except Exception as error:
            self._server.progress.enter("failed", error=f"{type(error).__name__}: {error}")
            logger.exception("the ingress has failed")
            raise

    async def _connect(self) -> replicated_engine.ReplicatedEngine:
        facts = await self._replicas.facts()
        given = self._options.engine
        found = None
        if not facts.config.skip_tokenizer_init:
            directory = await asyncio.to_thread(
                source.resolve,
                given.model_path,
                revision=given.revision,
                download_dir=given.download_dir,
            )
            found = await asyncio.to_thread(tokenizer.of_model, given, directory)
        return replicated_engine.ReplicatedEngine(
            self._replicas,
            facts,
            tokenizer=found,
            affinity_margin=self._options.replicas.affinity_margin,
        )


def application(options: Options, num_gpus: float) -> serve.Application:
    """Returns the application; each replica takes `num_gpus`."""
    replicas = options.replicas
    scale: dict[str, Any] = {"num_replicas": replicas.num_replicas}
    autoscaling = options.autoscaling()
    if autoscaling is not None:
        scale = {"num_replicas": None, "autoscaling_config": autoscaling}
    engines = serve.deployment(
        Engine,
        name="Engine",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=replicas.graceful_shutdown_timeout_s,
        logging_config=QUIET,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": num_gpus},
        request_router_config=serve.config.RequestRouterConfig(
            request_router_class="jdllm.replicas.ray_router:TargetRouter"
        ),
        **scale,
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=replicas.graceful_shutdown_timeout_s,
        logging_config=QUIET,
        # A model would not fit beside those of the replicas, and none is loaded.
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}},
    )
    made = engines.bind(options.engine, replicas.graceful_shutdown_timeout_s)
    return ingress.bind(made, options)


def _configure_logging(config: EngineConfig) -> None:
    """Sends the log of this process to stderr, which Ray collects."""
    logging.basicConfig(level=config.log_level.upper())
    log_format.install()
