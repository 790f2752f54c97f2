"""What every fake engine does alike: control and information, without what it makes.

`open_requests` are the ids of requests whose iterator is open: what holds memory in a real engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

from jdllm.device import facts
from jdllm.options import config


class FakeServing:
    """The part of `jdllm.engine.serving.Serving` in which texts and images do not differ."""

    def __init__(self, *, max_queued: int, engine_config: config.EngineConfig | None):
        self.config = engine_config or config.EngineConfig()
        self.device = facts.DeviceFacts(platform="cpu", device_kind="cpu")
        self.is_alive = True
        self.open_requests: set[str] = set()
        self.profiles: list[tuple[str, dict[str, Any]]] = []
        self.seen_priorities: list[float] = []  # one per call
        self.shut_down = False
        self._max_queued = max_queued
        self._admitting = True
        self._aborted: set[str] = set()

    def abort(self, request_ids: str | Collection[str] = (), *, abort_all: bool = False) -> int:
        ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        found = {r for r in self.open_requests if abort_all or r in ids}
        self._aborted |= found
        return len(found)

    def start_profile(self, output_dir: str, **options: Any) -> None:
        self.profiles.append((output_dir, options))

    def stop_profile(self) -> str:
        return self.profiles[-1][0]

    def flush_cache(self) -> bool:
        return not self.open_requests

    def heartbeat_age_s(self) -> float:
        return 0.0

    def server_info(self) -> dict[str, Any]:
        return {"model_path": None, "internal_states": [{}]}

    def model_info(self) -> dict[str, Any]:
        return {"model_path": None, "is_generation": True}

    def stats_per_replica(self) -> dict[str, Any]:
        return {}

    def stop_admitting(self) -> None:
        self._admitting = False

    def drain(self, timeout_s: float) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        deadline = time.monotonic() + timeout_s
        while self.open_requests and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.open_requests

    def shutdown(self) -> None:
        self.shut_down = True
