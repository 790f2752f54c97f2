"""Processes that end with the script that started them, whatever ends it.

An exception, Ctrl-C and SIGTERM end the block of `started`, and with it the process and all that it
has started. On Linux the kernel also kills the process when the script is killed: this file, run as
a program, asks for that and then becomes the command. (A function between fork and exec could ask
for it, too, but not safely in a script that has threads.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

STOP_S = 30.0
PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    output: IO[str] | int | None = None,
    environment: Mapping[str, str] | None = None,
    stop_s: float = STOP_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process, which has `stop_s` seconds to end after SIGTERM when the block ends.

    It leads a group of its own, of which nothing is left then. Its output goes to `output`, by
    default where the script's goes. For the main thread: only there signals can be handled.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _stop(process, stop_s)
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Returns how a process has ended, negative for a signal, or None; for loops over several.

    Unlike `poll` it leaves the pid to the process, so that no stranger has it when the block ends.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=stop_s)
    finally:  # also if a second signal ends the wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Becomes a command that is killed when the process that asked for it ends (Linux)."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent):  # it ended before the kernel was asked
            sys.exit("the process that asked for this one has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
