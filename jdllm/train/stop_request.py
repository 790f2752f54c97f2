"""Ctrl-C and SIGTERM: a run ends at the end of a step, whose checkpoint is written.

A signal ends at once what loses no step: the building of a model, an evaluation, an export. Within
`deferred` it is kept until the block ends; a second one ends that, too. Either way a
KeyboardInterrupt is raised, which no handler of errors takes for one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
NOTICE = b"\nstopping after this step; a second signal stops at once, and loses the last steps\n"


class StopRequest:
    """The signal that has asked to stop, if any; signals count within `listening`."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._is_deferred = False

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
        is_first = self.signal is None
        self.signal = self.signal or signal.Signals(number)
        if not (is_first and self._is_deferred):
            raise KeyboardInterrupt
        # Not logging: the signal may have come in the middle of a line of the log.
        os.write(STDERR, NOTICE)


def ignore_interrupts(*_: object) -> None:
    """For processes that make batches: Ctrl-C is theirs, too, and the last step needs them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
