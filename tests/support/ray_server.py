"""`python -m jdllm.serve --replicas 2` in a process of its own, with the bundled model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

START_S = 900.0  # two replicas compile at the same time
FLAGS = (
    "--max-running-requests=1",
    "--context-length=64",
    "--num-continuous-decode-steps=1",
    "--chunked-prefill-size=32",
    "--max-prefill-tokens=32",
    "--max-total-tokens=256",
    "--enable-metrics",
    "--drain-timeout-s=20",
)


class RayServer:
    """The running server and a client."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jdllm.serve", "--replicas=2", f"--port={port}", *FLAGS]
        # RAY_ADDRESS would name a cluster.
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.popen.stderr), daemon=True).start()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.popen.poll() is None, "".join(self.log)
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/ready").status_code == 200 and len(self.replicas()) == 2
            return False

        wait_until(is_ready, START_S)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Returns the state of each replica by its name."""
        states = self.http.get("/server_info").json()["internal_states"]
        return {state["replica"]: state for state in states}

    def generate(self, text: str, **options: Any) -> httpx.Response:
        return self.http.post("/generate", json=body(text, **options))


def body(text: str, **options: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
    return {"text": text, "sampling_params": sampling, **options}


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


@contextlib.contextmanager
def serving() -> Iterator[RayServer]:
    server = RayServer()
    try:
        server.wait_ready()
        yield server
    finally:
        server.http.close()
        server.popen.send_signal(signal.SIGTERM)
        try:
            server.popen.wait(timeout=90)
        except subprocess.TimeoutExpired:
            server.popen.kill()
            server.popen.wait()
