"""How far a stage is, and its learning rate: the end comes in time, whatever a step takes."""

from __future__ import annotations

import time

from jdllm.train.scenes.config import SceneConfig


class Clock:
    """The clock of a stage that begins now, after `first` steps of the run.

    Steps or minutes end a stage: `share` is that of the one of which more has passed. The minutes
    of the flow stage are what the run's first stage has left of them.
    """

    def __init__(self, config: SceneConfig, stage: str, *, first: int, run_began: float):
        self.stage = stage
        self._config, self._first, self._began = config, first, time.monotonic()
        minutes, self._last = config.vae_minutes, config.vae_steps
        if stage == "flow":
            minutes, self._last = config.max_minutes, config.num_steps
            if minutes is not None:
                minutes -= (self._began - run_began) / 60
        self._seconds = None if minutes is None else 60 * minutes

    def share(self, number: int) -> float:
        """Returns what has passed after `number` steps: 0 to 1, or more at the end."""
        by_steps = (number - self._first) / max(self._last - self._first, 1)
        if self._seconds is None:
            return by_steps
        elapsed = time.monotonic() - self._began
        return max(by_steps, elapsed / self._seconds if self._seconds > 0 else 1.0)

    def rate(self, number: int) -> float:
        """Returns the learning rate of the step after `number` steps."""
        config = self._config
        peak = config.learning_rate if self.stage == "flow" else config.vae_learning_rate
        warm = min(1.0, (number - self._first + 1) / config.warmup_steps)
        return peak * warm * min(max(1 - self.share(number), 0.0) / config.decay_share, 1.0)
