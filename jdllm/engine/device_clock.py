"""How long the device had nothing to do although requests were live, as the host can tell."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """Adds up live and idle seconds from samples that the engine takes a few times a round.

    The time between two samples is idle if nothing was running at the first. A launch that ends
    between two samples counts as running up to the second, so the sum is a lower bound; samples
    are at most the host's own work of one round apart.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.idle_s = 0.0
        self.total_s = 0.0
        self._now = now
        self._last: tuple[float, bool] | None = None

    def sample(self, is_busy: bool) -> None:
        """Notes whether a launch is running at this moment; requests are live."""
        now = self._now()
        if self._last is not None:
            at, was_busy = self._last
            self.total_s += now - at
            self.idle_s += 0.0 if was_busy else now - at
        self._last = (now, is_busy)

    def pause(self) -> None:
        """Notes that no request is live: the time up to the next sample does not count."""
        self._last = None
