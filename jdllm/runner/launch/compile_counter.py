"""Counts compilations in this process, to prove that none happens after start-up.

JAX reports each backend compile (or load from the persistent cache) as a monitoring event.
A listener cannot be removed, so this module registers one for the whole process.
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

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        """Counts an event of jax.monitoring, which calls it."""
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs


COUNTER = CompileCounter()
jax.monitoring.register_event_duration_secs_listener(COUNTER.on_event)
