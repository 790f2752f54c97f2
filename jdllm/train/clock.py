"""How far a stage of a run is, and its learning rate: it ends in time, whatever a step takes."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Seconds that a run and its present stage have taken, in all processes that it has had.

    Checkpoints keep them, so that a run that goes on has the minutes that are left.
    """

    run: float = 0.0
    stage: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clock of a stage that begins after `first` steps of the run, now or at `began`.

    One that goes on in another process began earlier than that by what has passed of it.

    Steps (`last`, counted from the start of the run) or seconds end a stage. The learning rate
    warms up, stays at its peak and falls linearly to 0 over the last `decay_share` of the stage.
    """

    peak: float
    warmup_steps: int
    decay_share: float
    first: int
    last: int
    seconds: float | None = None
    began: float = dataclasses.field(default_factory=time.monotonic)

    def passed(self) -> float:
        """Returns the seconds since the stage began."""
        return time.monotonic() - self.began

    def share(self, number: int) -> float:
        """Returns what has passed after `number` steps: 0 to 1, or more at the end.

        Of steps and seconds, the one of which more has passed counts.
        """
        by_steps = (number - self.first) / max(self.last - self.first, 1)
        if self.seconds is None:
            return by_steps
        return max(by_steps, self.passed() / self.seconds if self.seconds > 0 else 1.0)

    def rate(self, number: int) -> float:
        """Returns the learning rate of the step after `number` steps."""
        warm = min(1.0, (number - self.first + 1) / self.warmup_steps)
        return self.peak * warm * min(max(1 - self.share(number), 0.0) / self.decay_share, 1.0)
