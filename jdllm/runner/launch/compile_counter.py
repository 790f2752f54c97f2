"""Counts compilations in this process, to prove that none happens after start-up.

JAX reports each backend compile (or persistent-cache load) through its monitoring
events; a listener cannot be removed, so one is registered per process.
"""

from __future__ import annotations

import dataclasses
import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(slots=True)
class CompileCounter:
    """Number and seconds of compilations since the process began."""

    count: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def on_event(self, event: str, duration_s: float, **_: object) -> None:
        """Listener of jax.monitoring."""
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_s


COUNTER = CompileCounter()
jax.monitoring.register_event_duration_secs_listener(COUNTER.on_event)
