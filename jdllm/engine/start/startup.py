"""The progress of the start; other threads can read it (the `/health` route does)."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Literal

StartupPhase = Literal["load", "compile", "warmup", "ready", "failed"]


@dataclasses.dataclass(slots=True)
class StartupProgress:
    """The current phase and how many of its steps are done; the loading thread writes it."""

    phase: StartupPhase = "load"
    done: int = 0
    total: int = 0
    error: str | None = None
    _phase_began_s: float = dataclasses.field(default_factory=time.monotonic)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def enter(self, phase: StartupPhase, *, total: int = 0, error: str | None = None) -> None:
        """Begins a phase of `total` steps."""
        with self._lock:
            self.phase, self.done, self.total, self.error = phase, 0, total, error
            self._phase_began_s = time.monotonic()

    def advance(self, done: int, total: int) -> None:
        """Notes that `done` of `total` steps of this phase are complete."""
        with self._lock:
            self.done, self.total = done, total

    def eta_s(self) -> float | None:
        """Returns the estimated seconds left in this phase, None before its first step."""
        with self._lock:
            if not self.done or self.done >= self.total:
                return None
            elapsed = time.monotonic() - self._phase_began_s
            return elapsed / self.done * (self.total - self.done)

    def as_dict(self) -> dict[str, object]:
        """Returns the JSON that `/health` shows during the start."""
        eta_s = self.eta_s()
        return {
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "eta_s": None if eta_s is None else round(eta_s, 1),
            **({"error": self.error} if self.error else {}),
        }
