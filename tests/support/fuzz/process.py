"""The server that a campaign attacks: `python -m jdllm.serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from support import cut_model, waiting
from support.fuzz import campaign

from jdllm.server import lifecycle

START_S = 900.0  # beside another test run on two cores
# As few launches as serve every kind of request.
FLAGS = (
    "--port=0",
    "--context-length=512",
    "--chunked-prefill-size=64",
    "--dllm-algorithm=LowConfidence,JointThreshold",
    "--max-queued-requests=64",
    "--enable-metrics",
    "--log-level-http=info",
    "--timeout-read-request=5",
)


class Server:
    """A running server; `log` grows while it runs."""

    def __init__(
        self,
        folder: pathlib.Path,
        model: pathlib.Path,
        flags: Sequence[str],
        env: Mapping[str, str],
    ):
        keys = folder / "keys"
        keys.write_text(f"{campaign.ATTACKER}\n{campaign.CLIENT}\n")
        keys.chmod(0o600)
        own = (f"--api-key-file={keys}", f"--admin-api-key={campaign.ADMIN}")
        load = () if (model / cut_model.WEIGHTS).is_file() else ("--load-format=dummy",)
        served = (f"--model-path={model}", *load, *flags)
        command = [sys.executable, "-m", "jdllm.serve", *FLAGS, *own, *served]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.popen.stderr))
        self._reader.start()

    def wait_ready(self) -> int:
        """Returns the port once requests are served."""

        def is_ready() -> bool:
            assert self.popen.poll() is None, "".join(self.log)
            return any(lifecycle.READY_LINE in line for line in self.log)

        waiting.wait_until(is_ready, START_S)
        (port,) = re.findall(r"listening on http://\S+:(\d+);", "".join(self.log))
        return int(port)

    def stop(self) -> int:
        """Ends the server as its operator does; returns the exit code, with all of the log read."""
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(timeout=60)
        self._reader.join()
        return code


@contextlib.contextmanager
def serving(
    folder: pathlib.Path, model: pathlib.Path, *flags: str, **env: str
) -> Iterator[tuple[Server, int]]:
    """Yields a server of `model` and its port; `env` replaces variables of the environment."""
    server = Server(folder, model, flags, os.environ | env)
    try:
        yield server, server.wait_ready()
    finally:
        server.popen.kill()
        server.popen.wait()
