"""Repeats calls while a server is starting or full."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import TypeVar

from jdllm.client import failures

Result = TypeVar("Result")

UNAVAILABLE = 503


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often, for how long and after which failures a call is repeated.

    A call is repeated if the server is unavailable (503), and with `when_absent` also if there
    is no server. With `obeys_server` the pause is that of the `Retry-After` header, if there is
    one.
    """

    pause_s: float
    max_attempts: float = math.inf
    timeout_s: float = math.inf
    when_absent: bool = False
    obeys_server: bool = False

    def call(self, function: Callable[[], Result]) -> Result:
        """Returns what `function` returns, or raises its last failure."""
        deadline_s = time.monotonic() + self.timeout_s
        attempts = 0
        while True:
            attempts += 1
            try:
                return function()
            except failures.CallFailed as failure:
                is_last = attempts >= self.max_attempts or time.monotonic() >= deadline_s
                if is_last or not self.covers(failure):
                    raise
                pause_s = self._pause_s(failure)
            time.sleep(pause_s)

    def covers(self, failure: failures.CallFailed) -> bool:
        """Says whether a call may succeed later, after this failure."""
        match failure:
            case failures.Refused(status=status):
                return status == UNAVAILABLE
            case failures.NoConnection():
                return self.when_absent
        return False

    def _pause_s(self, failure: failures.CallFailed) -> float:
        if self.obeys_server and isinstance(failure, failures.Refused):
            return self.pause_s if failure.retry_after_s is None else failure.retry_after_s
        return self.pause_s
