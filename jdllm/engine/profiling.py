"""Traces of JAX's profiler, taken while the engine serves.

The engine thread counts the launches of a trace that is to end by itself. Writing a trace takes
seconds, so another thread does it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading

import jax

from jdllm import errors

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Trace:
    log_dir: str
    steps_left: int | None  # None: until somebody stops it


class Profiler:
    """At most one trace at a time: JAX has one profiler per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trace: _Trace | None = None

    def start(self, log_dir: str, *, num_steps: int | None = None, python: bool = True) -> None:
        """Begins a trace, which ends after `num_steps` launches, or with `stop`.

        `python` says whether it shows Python's calls.
        """
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(python)
        with self._lock:
            if self._trace is not None:
                raise errors.RequestError("a profile is being taken", code="profile_running")
            try:
                jax.profiler.start_trace(log_dir, profiler_options=options)
            except RuntimeError as error:  # a trace that somebody else began in this process
                raise errors.RequestError(str(error), code="profile_running") from error
            self._trace = _Trace(log_dir, num_steps)
        logger.info("profile: tracing into %s", log_dir)

    def stop(self) -> str:
        """Ends the trace and writes it; returns its folder. Without a trace: a RequestError."""
        with self._lock:
            if self._trace is None:
                raise errors.RequestError("no profile is being taken", code="no_profile")
            return self._write()

    def count_step(self) -> None:
        """Counts a launch; the engine thread calls it after every launch."""
        trace = self._trace
        if trace is None or trace.steps_left is None:
            return
        trace.steps_left -= 1
        if trace.steps_left <= 0:
            trace.steps_left = None
            threading.Thread(
                target=self._end, args=(trace,), name="jdllm-profile", daemon=True
            ).start()

    def _end(self, trace: _Trace) -> None:
        """Ends a trace whose launches have been counted, unless somebody has stopped it before."""
        with self._lock:
            if self._trace is not trace:
                return
            try:
                self._write()
            except Exception:  # the end of a thread: nobody else would learn of it
                logger.exception("profile: the trace could not be written")

    def _write(self) -> str:
        assert self._trace is not None, "checked by the callers, who hold the lock"
        log_dir, self._trace = self._trace.log_dir, None
        jax.profiler.stop_trace()
        logger.info("profile: wrote %s", log_dir)
        return log_dir
