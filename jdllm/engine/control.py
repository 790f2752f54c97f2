"""What every engine does alike, whatever its model makes: one thread, its aborts and its end.

`Engine` (text) and `ImageEngine` build a core and pass it here.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar

from jdllm import errors
from jdllm.engine import serving
from jdllm.engine.core import EngineCore
from jdllm.engine.loop import EngineLoop
from jdllm.engine.start import startup
from jdllm.options.config import EngineConfig, from_mapping

Built = TypeVar("Built")


def built(
    build: Callable[[EngineConfig, startup.StartupProgress], Built],
    config: EngineConfig | None,
    options: dict[str, Any],
    progress: startup.StartupProgress,
) -> Built:
    """Builds from a config or from keyword options, not both; `progress` tells of a failure."""
    if config is not None and options:
        raise TypeError("give either a config or keyword options, not both")
    if not isinstance(config, EngineConfig | None):
        raise TypeError(
            f"the first argument is an EngineConfig, got {errors.quote(config)}; give the options "
            "of one by name, such as model_path=..."
        )
    given = config or from_mapping(EngineConfig, options)
    try:
        return build(given, progress)
    except Exception as error:
        progress.enter("failed", error=str(error))
        raise


class EngineControl:
    """Runs a core in a thread of its own until `shutdown`.

    `release` frees what the engine holds beside its thread; it is called once the thread has ended.
    An engine that nobody refers to is stopped by the garbage collector.
    """

    def __init__(self, core: EngineCore, release: Callable[[], object]):
        self._core = core
        self._release = release
        self._loop = EngineLoop(core)
        self._finalizer = weakref.finalize(self, EngineLoop.stop, self._loop)

    def abort(self, request_ids: str | Collection[str] = (), *, abort_all: bool = False) -> int:
        """Aborts the requests with exactly these ids, or all; returns how many.

        If a prompt has several choices, or a call several images, each is a request: `rid-0`,
        `rid-1` and so on.
        """
        ids = {request_ids} if isinstance(request_ids, str) else frozenset(request_ids)
        if not ids and not abort_all:
            return 0
        return self._loop.abort(None if abort_all else ids).result()

    def flush_cache(self) -> bool:
        """Empties the caches (K,V of prefixes, captions); while requests run: False, and nothing.

        Nothing else is kept between requests.
        """
        return self._loop.call(self._core.scheduler.flush_cache).result()

    def stats_per_replica(self) -> Mapping[str, serving.Stats]:
        """Returns nothing: this engine is no replica among others."""
        return {}

    def stop_admitting(self) -> None:
        """Refuses new requests from now on; running requests continue."""
        self._loop.is_admitting = False

    def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left; returns False if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._core.requests:
            if time.monotonic() >= deadline or not self._loop.is_alive:
                return False
            time.sleep(0.02)
        return True

    def start_profile(
        self, output_dir: str, *, num_steps: int | None = None, with_stack: bool = True
    ) -> None:
        """Begins a trace of JAX's profiler; it ends after `num_steps` launches or `stop_profile`.

        `with_stack` adds Python's calls. A second trace at the same time is a RequestError.
        """
        self._loop.profiler.start(output_dir, num_steps=num_steps, python=with_stack)

    def stop_profile(self) -> str:
        """Ends the trace and writes it; returns its folder. Without a trace: a RequestError."""
        return self._loop.profiler.stop()

    def shutdown(self) -> None:
        """Stops the engine thread and frees the device's memory."""
        self.stop_admitting()
        self._finalizer()
        self._release()
        with contextlib.suppress(errors.RequestError):  # no trace is being taken
            self.stop_profile()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def is_alive(self) -> bool:
        return self._loop.is_alive

    def heartbeat_age_s(self) -> float:
        """Returns seconds since the engine thread last began a round."""
        return time.monotonic() - self._loop.beat_s

    def _check_places(self, count: int, places: int, what: str, param: str) -> None:
        """Raises if `count` requests can never run and wait, or `QueueFull` if they cannot now.

        While other requests arrive, this is a forecast: the engine thread decides, for all or none
        of them. `what` names them, and `param` the field that asks for so many.
        """
        if count > places:
            raise errors.RequestError(
                f"{what} can never fit: "
                f"max_running_requests and max_queued_requests allow {places} together",
                param=param,
            )
        self._core.scheduler.check_room(count)
