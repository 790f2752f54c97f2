"""`jdllm serve --replicas N`: the application on a Ray of its own, from the start to the exit code.

`jdllm.serve` loads this module only then, since it needs Ray. If RAY_ADDRESS names a cluster, the
replicas run there.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import types

from jdllm import ray_app
from jdllm.replicas.options import Options, ReplicaConfig
from jdllm.server import cli, lifecycle
from jdllm.server.operations import summary

logger = logging.getLogger(__name__)

NAME = "jdllm"
POLL_S = 0.5


def run(options: cli.Options) -> int:
    """Serves until a signal or a failed start; returns the exit code."""
    server = options.server
    listener = lifecycle.bind(server.host, server.port)  # or the reason why not, as one process
    host, port = listener.getsockname()[:2]
    listener.close()
    app_options = Options(
        engine=options.engine,
        server=server,
        replicas=ReplicaConfig(
            num_replicas=server.replicas,
            # Fewer CPUs than replicas must not keep them from starting.
            num_cpus=round(min(1.0, (os.cpu_count() or 1) / server.replicas), 2),
            graceful_shutdown_timeout_s=server.drain_timeout_s,
        ),
    )
    ray, serve = ray_app.ray, ray_app.serve
    ray.init(include_dashboard=False)
    stop = threading.Event()

    def on_signal(number: int, _: types.FrameType | None) -> None:
        if stop.is_set():
            logger.warning("second signal: exiting at once")
            os._exit(128 + number)
        logger.info("received %s: no new requests, draining", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    start = Start(app_options, host, port, summary.url(host, port), stop)
    try:
        start.start()
        while not stop.wait(POLL_S):
            pass
        if start.is_ready:
            ingress = serve.get_app_handle(NAME)
            if not ingress.drain.remote(server.drain_timeout_s).result():
                logger.warning("requests were left after %.0f s", server.drain_timeout_s)
    finally:
        serve.shutdown()
        ray.shutdown()
    return lifecycle.FAILED_EXIT_CODE if start.has_failed else 0


class Start(threading.Thread):
    """Deploys the application and waits until it is ready; sets `stop` if it never will be."""

    def __init__(self, options: Options, host: str, port: int, url: str, stop: threading.Event):
        super().__init__(name="start", daemon=True)
        self._options = options
        self._http = {"host": host, "port": port}
        self._url = url
        # Named apart from threading.Thread's own `_stop`.
        self._stop_event = stop
        self.is_ready = False
        self.has_failed = False

    def run(self) -> None:
        serve = ray_app.serve
        try:
            serve.start(http_options=self._http)
            ingress = serve.run(ray_app.application(self._options), name=NAME, route_prefix="/")
            while not ingress.is_ready.remote().result():
                time.sleep(POLL_S)
        except Exception as error:  # the edge of the process: log the fault, exit with 1
            if not self._stop_event.is_set():
                logger.error("the replicas failed to start", exc_info=error)
                lifecycle.print_error(f"{type(error).__name__}: {error}")
                self.has_failed = True
                self._stop_event.set()
            return
        self.is_ready = True
        logger.info("%d replicas behind %s", self._options.replicas.num_replicas, self._url)
        logger.info(lifecycle.READY_LINE)
