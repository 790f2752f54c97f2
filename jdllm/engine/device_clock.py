"""How long the device had nothing to do although requests were live, as the host can tell."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """Adds up live and idle seconds from looks that the engine takes a few times a round.

    The time between two looks is idle if nothing was running at the first. A launch that ends
    between two looks counts as running up to the second, so the sum is a lower bound; looks are
    at most the host's own work of one round apart.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.idle_s = 0.0
        self.total_s = 0.0
        self._now = now
        self._looked: tuple[float, bool] | None = None

    def look(self, is_busy: bool) -> None:
        """Tells whether a launch is running at this moment; requests are live."""
        now = self._now()
        if self._looked is not None:
            at, was_busy = self._looked
            self.total_s += now - at
            self.idle_s += 0.0 if was_busy else now - at
        self._looked = (now, is_busy)

    def pause(self) -> None:
        """Tells that no request is live: the time up to the next look does not count."""
        self._looked = None
