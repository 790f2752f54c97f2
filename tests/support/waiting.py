"""Waits for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 60.0  # of what takes a moment: a busy machine is no failure


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Returns when the condition holds; fails when it has not come true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {limit_s:.0f} s"
        time.sleep(0.002)
