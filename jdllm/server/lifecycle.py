"""Start-up, signals and shutdown of one server process.

The port is bound first. A thread loads the engine while `/health` shows its progress. On
SIGTERM or SIGINT the server refuses new requests, waits for the running ones, aborts what is
left after the timeout and exits with 0; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import uvicorn

from jdllm import errors
from jdllm.host import arguments
from jdllm.server import app, state
from jdllm.server.edge import connections, log_format, open_files
from jdllm.server.operations import health, summary

if TYPE_CHECKING:
    from jdllm.engine.engine import Engine
    from jdllm.engine.images import requests
    from jdllm.engine.start import startup
    from jdllm.options import config

logger = logging.getLogger(__name__)

READY_LINE = "The server is fired up and ready to roll!"  # verbatim: tools grep for it
CONFIG_EXIT_CODE = 2
FAILED_EXIT_CODE = 1
WARMUP_TOKENS = 8
# Seconds for sending the last answers after the last request has ended.
GOODBYE_S = 5
BACKLOG = 2048

AnyEngine: TypeAlias = "Engine | requests.ImageServing"
EngineBuilder = Callable[["startup.StartupProgress"], AnyEngine]


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop the server before the drain.

    Its `backlog` is only how many connections asyncio accepts at a time; more of them may wait.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    server_config: config.ServerConfig,
    build_engine: EngineBuilder,
    progress: startup.StartupProgress,
) -> int:
    """Serves until a signal or a failed start; returns the exit code."""
    listener = bind(server_config.host, server_config.port)
    server = state.ServerState(server_config=server_config, progress=progress)
    return asyncio.run(Lifecycle(server, build_engine).run(listener))


def http_server(server: state.ServerState) -> QuietServer:
    """Returns uvicorn around the app of `server`."""
    read_timeout_s = server.server_config.timeout_read_request
    limits = open_files.limits()
    return QuietServer(
        uvicorn.Config(
            app.create_app(server),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=GOODBYE_S,
            # uvicorn would take another protocol where httptools happens to be installed.
            http=connections.with_limits(read_timeout_s, limits.max_connections),
            backlog=limits.accepted_at_once,
            timeout_keep_alive=server.server_config.timeout_keep_alive,  # pyright: ignore[reportArgumentType]  # goes to call_later, which takes floats
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; a port in use is a ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the socket names its protocol. Without TCP_NODELAY
        # every reply on a kept-alive connection waits some 40 ms for the client's delayed ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise errors.ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return listener


class Lifecycle:
    """One run of a server, from the open port to the exit code."""

    def __init__(self, server: state.ServerState, build_engine: EngineBuilder):
        self._server = server
        self._build_engine = build_engine
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._url = ""

    async def run(self, listener: socket.socket) -> int:
        """Serves on `listener` until a signal or a failed start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # Logged only now: from here on a signal is handled.
        self._url = summary.url(*listener.getsockname()[:2])
        logger.info("listening on %s; /health tells how far the start is", self._url)
        http = http_server(self._server)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        # A daemon thread: after a signal the process must not wait for a long compilation.
        threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()
        await self._stop.wait()
        await self._drain()
        http.should_exit = True
        await serving
        await self._close_engine()
        return self._exit_code

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            logger.warning("second signal: exiting at once")
            os._exit(128 + number)
        logger.info("received %s: no new requests, draining", signal.Signals(number).name)
        self._server.phase = "draining"
        self._stop.set()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Builds the engine, warms it up and lets requests in; runs in the loading thread."""
        try:
            engine = self._build_engine(self._server.progress)
            if not self._server.server_config.skip_server_warmup:
                self._server.progress.enter("warmup", total=1)
                warm_up(engine)
            # What exists now stays. A look at all of it, by the collector, stops every thread for
            # half a second.
            gc.collect()
            gc.freeze()
        except errors.ConfigError as error:
            self._call(loop, self._fail, CONFIG_EXIT_CODE, str(error))
        except Exception as error:  # the edge of the process: log the fault, exit with 1
            logger.error("the engine failed to start", exc_info=error)
            self._call(loop, self._fail, FAILED_EXIT_CODE, f"{type(error).__name__}: {error}")
        else:
            self._call(loop, self._open, engine)

    def _call(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
    ) -> None:
        # The event loop is closed if a signal ended the run while this thread was loading.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *arguments)

    def _open(self, engine: AnyEngine) -> None:
        self._server.loaded_engine = engine
        if self._stop.is_set():
            return
        self._server.progress.enter("ready")
        self._server.phase = "ready"
        command = summary.example(self._url, self._server.server_config, summary.route(engine))
        logger.info("%s is ready; try this:", self._url)
        logger.info("%s", command)
        logger.info(READY_LINE)

    def _fail(self, exit_code: int, message: str) -> None:
        if self._stop.is_set():
            return
        self._server.progress.enter("failed", error=message)
        print_error(message)
        self._exit_code = exit_code
        self._stop.set()

    async def _drain(self) -> None:
        engine = self._server.loaded_engine
        if engine is None:
            return
        engine.stop_admitting()
        timeout_s = self._server.server_config.drain_timeout_s
        if not await asyncio.to_thread(engine.drain, timeout_s):
            aborted = await asyncio.to_thread(functools.partial(engine.abort, abort_all=True))
            logger.warning("aborted %d requests after %.0f s of draining", aborted, timeout_s)

    async def _close_engine(self) -> None:
        if self._server.loaded_engine is not None:
            await asyncio.to_thread(self._server.loaded_engine.shutdown)


def warm_up(engine: AnyEngine) -> None:
    """Runs a first small request."""
    if engine.output_modality == "image":
        engine.warm_up()
        return
    prompt = health.probe_ids(engine.tokenizer)
    engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": WARMUP_TOKENS})


def print_error(message: str) -> None:
    """Writes to stderr, in one line, why the server does not run."""
    arguments.report("jdllm serve", log_format.escaped(" ".join(message.split())))
