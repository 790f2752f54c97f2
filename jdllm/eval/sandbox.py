"""Runs untrusted programs, each in a process of its own with hard limits, and says if it passed.

`confined.py` is what runs in that process. The process gets an empty environment, an empty
folder that is deleted afterwards, no stdin, and no terminal; its output is dropped. It is killed
when its time is over or its folder too large. A program has passed only if the process reports a
secret token after the program ran to its end: exit code and output say nothing.

This is a guard against what models write by accident and against plain malice. A program that
searches the interpreter's memory for the token could cheat, and it can read the files of the user
who runs the evaluation. For a model that you have reason to fear, use a virtual machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

from jdllm import errors
from jdllm.eval import confined

MEBIBYTE = 1024 * 1024
CONFINED = pathlib.Path(confined.__file__)
MAX_ANSWER = 8192  # bytes; what a program writes to the pipe itself is no answer
POLL_S = 0.05
# Each must fail in a confined process.
PROBE = """
import os, socket
def refuses(call):
    try:
        call()
    except OSError:
        return True
    return False
assert refuses(os.fork), "a process can be started"
assert refuses(socket.socket), "a socket can be opened"
assert refuses(lambda: os.kill(os.getppid(), 0)), "signals can be sent"
assert refuses(lambda: open(os.path.join(os.path.dirname(os.getcwd()), "x"), "w")), "files outside"
open("inside", "w").write("x")
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use; `folder_bytes` is the sum over the files in its folder."""

    time_s: float = 10.0
    memory_bytes: int = 1024 * MEBIBYTE
    file_bytes: int = 16 * MEBIBYTE
    folder_bytes: int = 64 * MEBIBYTE
    open_files: int = 64

    def of_process(self) -> dict[str, int]:
        """Returns the values of `setrlimit` by name."""
        return {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": int(self.time_s) + 1,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether the program ran to its end, and what stopped it otherwise."""

    passed: bool
    message: str = ""


class Sandbox:
    """Runs programs, one per CPU at a time; several threads may call `run`.

    With `isolates` (the default) this raises a `ConfigError` where the system cannot keep a
    program from the network, from other processes and from files. Without it only the limits hold.
    """

    def __init__(self, *, isolates: bool = True, limits: Limits | None = None):
        self.isolates = isolates
        self._limits = limits or Limits()
        # More at a time would take memory, and time from one another.
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)
        if isolates:
            outcome = self.run(PROBE)
            if not outcome.passed:
                raise errors.ConfigError(
                    f"programs cannot be isolated here ({outcome.message}): that needs Linux with "
                    "seccomp and Landlock; --allow-unisolated-code runs them with limits only"
                )

    def run(self, program: str) -> Outcome:
        """Runs a Python program, at most `time_s` long."""
        token = secrets.token_hex(32)
        # Removal may fail halfway if the program took away permissions; nothing is left to save.
        with tempfile.TemporaryDirectory(prefix="jdllm-", ignore_cleanup_errors=True) as folder:
            inner = pathlib.Path(folder, "work")
            inner.mkdir()
            with self._places:
                answer, stopped = self._answer(program, token, inner)
        for line in answer.splitlines():
            said, _, rest = line.partition(" ")
            if secrets.compare_digest(said.encode(), token.encode()):
                found = json.loads(rest)
                message = found.get("message") or found.get("unavailable") or ""
                return Outcome(passed=bool(found.get("passed")), message=message)
        return Outcome(passed=False, message=stopped or "it ended before the tests did")

    def _answer(self, program: str, token: str, folder: pathlib.Path) -> tuple[str, str]:
        """Returns what came through the pipe, and why the process was stopped, if it was."""
        read, write = os.pipe()
        order = {
            "program": program,
            "token": token,
            "pipe": write,
            "limits": self._limits.of_process(),
            "isolates": self.isolates,
        }
        with open(read, "rb", buffering=0) as pipe:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", str(CONFINED)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={"OPENBLAS_NUM_THREADS": "1"},  # it starts threads on import otherwise
                    pass_fds=(write,),
                    start_new_session=True,
                )
            finally:
                os.close(write)
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(json.dumps(order).encode())
                return self._wait(pipe.fileno(), folder)
            finally:
                _kill(process)

    def _wait(self, pipe: int, folder: pathlib.Path) -> tuple[str, str]:
        """Reads the pipe until it is closed or a limit is reached."""
        deadline = time.monotonic() + self._limits.time_s
        answer = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], POLL_S)
            part = os.read(pipe, MAX_ANSWER) if ready else b""
            answer += part
            if ready and not part:
                return answer.decode(errors="replace"), ""
            if len(answer) > MAX_ANSWER:
                return "", "it wrote to the pipe of its verdict"
            if time.monotonic() > deadline:
                return "", f"it ran longer than {self._limits.time_s:g} s"
            if _size(folder) > self._limits.folder_bytes:
                return "", f"it wrote more than {self._limits.folder_bytes} bytes"


def _size(folder: pathlib.Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its group; it may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
