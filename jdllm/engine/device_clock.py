"""Measures, from the host, how long the device was idle although requests were live."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """Adds up live and idle seconds from samples that the engine takes a few times a round.

    The time between two samples counts as idle if no launch was running at the first. A launch
    that ends between two samples counts as running up to the second, so the idle time is a lower
    bound. Two samples are never further apart than the host's own work of one round.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.idle_s = 0.0
        self.total_s = 0.0
        self._now = now
        self._last: tuple[float, bool] | None = None

    def sample(self, is_busy: bool) -> None:
        """Notes whether a launch is running at this moment, while requests are live."""
        now = self._now()
        if self._last is not None:
            at, was_busy = self._last
            self.total_s += now - at
            self.idle_s += 0.0 if was_busy else now - at
        self._last = (now, is_busy)

    def pause(self) -> None:
        """Notes that no request is live: the time up to the next sample does not count."""
        self._last = None
