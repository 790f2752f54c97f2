"""Whether a launch that should end all rows is waited for before another one starts behind it."""

from __future__ import annotations

import time

from jdllm.scheduler import batch as batch_lib

_POLL_S = 2e-4


class Pacing:
    """What the steps of launches take, by the results that were read."""

    def __init__(self) -> None:
        self._began_s = 0.0  # when the device began the launch in flight
        self._step_s = 0.0  # what a step of the last launch took

    def start(self) -> None:
        """Says that a launch starts on a device that is idle."""
        self._began_s = time.monotonic()

    def finish(self, result: batch_lib.LaunchResult) -> None:
        """Says that a launch has ended, and that the one behind it, if any, begins."""
        now = time.monotonic()
        if result.num_steps:
            self._step_s = (now - self._began_s) / result.num_steps
        self._began_s = now

    def waits_for_end(
        self, batch: batch_lib.ScheduleBatch, launch: batch_lib.Launch, steps_left: float
    ) -> bool:
        """Waits for a launch that should end all its rows early; returns whether it has ended.

        `steps_left`: within how many steps it should. A launch behind it would do nothing. To start
        one takes the host as long as steps of the device, in which nobody reads what this one
        brings and no new request begins (H200, LLaDA-8B, one row: 6 to 12 ms beside steps of 5). A
        launch that takes longer than it should is waited for until the device should be half
        through with its steps, which leaves the host the other half to start the next one.
        """
        patience = batch.max_steps // 2
        if steps_left > patience:
            return False
        deadline = self._began_s + patience * self._step_s
        while not launch.is_ready() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return launch.is_ready()
