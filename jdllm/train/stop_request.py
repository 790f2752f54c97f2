"""Ctrl-C and SIGTERM: a run ends at the end of a step, whose checkpoint is written.

A signal ends at once what loses no step: the building of a model, an evaluation, an export. Within
`deferred` it is kept until the block ends; a second one ends that, too (the same one within a
second is the first). Either way a KeyboardInterrupt is raised, which no handler of errors takes
for one.

Most senders mean the whole group of processes, with those that make batches. Ctrl-C never reaches
these, see `unseen_by_children`. SIGTERM ends them, and whoever waits for them asks `comes`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
# Within this time the processes of a group all have a signal, and some senders repeat theirs:
# `timeout` of coreutils sends it to the command and then to the command's group.
SENDING_S = 1.0
NOTICE = b"\nstopping after this step; a second signal stops at once, and loses the last steps\n"


class StopRequest:
    """The signal that has asked to stop, if any; signals count within `listening`."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._is_deferred = False
        self._taken_at = 0.0  # seconds of `time.monotonic`

    def comes(self) -> bool:
        """Returns whether a signal has asked, or does while a group's processes get theirs."""
        deadline = time.monotonic() + SENDING_S
        while self.signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the process's signals, also SIGINT where a shell's background job ignores it."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Keeps the first signal until the block ends; what is in it looks at `signal`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        self._raise_if_asked()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Ends a part of a deferred block by any signal, also by one from before."""
        self._is_deferred = False
        try:
            self._raise_if_asked()
            yield
        finally:
            self._is_deferred = True

    def _raise_if_asked(self) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        is_first, now = self.signal is None, time.monotonic()
        if is_first:
            self.signal, self._taken_at = signal.Signals(number), now
        elif number == self.signal and now - self._taken_at < SENDING_S:
            return  # sent again, not asked again
        if not (is_first and self._is_deferred):
            raise KeyboardInterrupt
        # Not logging: the signal may have come in the middle of a line of the log.
        os.write(STDERR, NOTICE)


@contextlib.contextmanager
def unseen_by_children() -> Iterator[None]:
    """Hides Ctrl-C from processes that the block starts, from their first instruction on.

    Ctrl-C is sent to them, too, and the last step needs them. The calling thread, and threads that
    the block starts, do not see it either; the process does.
    """
    # Where `multiprocessing` starts it inside the block, it would end the block's mask (3.11).
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
