"""Decides when to wait for a launch that should end all its rows, before the next one starts."""

from __future__ import annotations

import time

from jdllm.scheduler.batch import Launch, LaunchResult, ScheduleBatch

_POLL_S = 2e-4


class Pacing:
    """Knows how long a step takes, from the results of the launches so far."""

    def __init__(self) -> None:
        self._began_s = 0.0  # when the device began the launch in flight
        self._step_s = 0.0  # how long a step of the last launch took

    def start(self) -> None:
        """Notes that a launch starts on an idle device."""
        self._began_s = time.monotonic()

    def finish(self, result: LaunchResult) -> None:
        """Notes that a launch has ended, and that the one behind it, if any, begins."""
        now = time.monotonic()
        if result.num_steps:
            self._step_s = (now - self._began_s) / result.num_steps
        self._began_s = now

    def waits_for_end(self, batch: ScheduleBatch, launch: Launch, steps_left: float) -> bool:
        """Waits for a launch if it should end all its rows early; returns whether it has ended.

        `steps_left` is the number of steps within which all its rows should end. After that, a
        launch behind it would have nothing to do. Starting one nevertheless costs the host more
        than a step of the device, and in that time nobody reads the results of this launch and no
        new request begins (H200, LLaDA-8B, one row: 6 to 12 ms, where a step takes 5 ms). If the
        launch takes longer than expected, the wait ends when the device should have run half of
        its steps. The other half leaves the host time to start the next launch.
        """
        patience = batch.max_steps // 2
        if steps_left > patience:
            return False
        deadline = self._began_s + patience * self._step_s
        while not launch.is_ready() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return launch.is_ready()
