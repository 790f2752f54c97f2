"""A server for a benchmark: starts `python -m jdllm.serve`, waits until it is ready, ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import child_process

from jdllm.bench import command_line, running_server
from jdllm.client import transport

COMMAND = (sys.executable, "-m", "jdllm.serve")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is ready, `start_s` seconds after it was started."""

    client: transport.Client
    model: str
    process_id: int
    start_s: float


@contextlib.contextmanager
def started(flags: Sequence[str], *, log_file: str, limit_s: float) -> Iterator[Server]:
    """Yields a server on a free port; ends the program with its log if it does not start.

    The server ends with the block, and with the script whatever ends it (see `child_process`).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = transport.Client(f"http://127.0.0.1:{port}", timeout_s=running_server.TIMEOUT_S)
    began_s = time.monotonic()
    with (
        pathlib.Path(log_file).open("a") as log,
        child_process.started([*COMMAND, "--port", str(port), *flags], output=log) as process,
    ):
        model = wait_until_ready(client, process, log_file=log_file, limit_s=limit_s)
        yield Server(
            client=client,
            model=model,
            process_id=process.pid,
            start_s=time.monotonic() - began_s,
        )


def wait_until_ready(
    client: transport.Client, process: subprocess.Popen[bytes], *, log_file: str, limit_s: float
) -> str:
    """Returns the model's name; ends the program with the server's log if it does not start."""
    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(command_line.BenchError):
            return running_server.find_model(client, None, timeout_s=0)
        time.sleep(running_server.POLL_S)
    tail = pathlib.Path(log_file).read_text()[-2000:]
    how = "in time" if process.returncode is None else f"but ended with {process.returncode}"
    raise SystemExit(f"the server did not start {how}; the end of {log_file}:\n{tail}")
