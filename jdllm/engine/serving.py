"""What the server asks of every engine, whatever its model makes.

`Engine` writes text, `ImageServing` (`images/requests.py`) makes images. Health, metrics, aborts,
profiles and the shutdown use only what stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Protocol

from jdllm.device import facts
from jdllm.options.config import EngineConfig

Modality = Literal["text", "image"]


class Stats(Protocol):
    """A snapshot of numbers: a dataclass, each field of which is a metric of the same name.

    Fields that end in `_total` are counters, all others gauges.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def num_running_reqs(self) -> int: ...
    @property
    def num_queue_reqs(self) -> int: ...
    @property
    def max_running_requests(self) -> int: ...


class Serving(Protocol):
    """An engine that serves one model. Methods may be called from any thread."""

    @property
    def output_modality(self) -> Modality:
        """What the model makes."""
        ...

    @property
    def model_name(self) -> str: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def device(self) -> facts.DeviceFacts: ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    def heartbeat_age_s(self) -> float:
        """Returns how many seconds ago the engine thread last went round its loop."""
        ...

    def stats(self) -> Stats: ...

    def stats_per_replica(self) -> Mapping[str, Stats]:
        """Returns the statistics by the name of the replica; empty if the model runs here."""
        ...

    def server_info(self) -> dict[str, Any]:
        """Returns what /server_info shows beside the options of the server; values are JSON."""
        ...

    def model_info(self) -> dict[str, Any]:
        """Returns SGLang's description of the model for /model_info."""
        ...

    def abort(self, request_ids: str | Collection[str] = (), *, abort_all: bool = False) -> int:
        """Ends requests by their exact ids, or all; returns how many there were."""
        ...

    def flush_cache(self) -> bool:
        """Empties what is kept between requests; False, and nothing done, while some run."""
        ...

    def start_profile(
        self, output_dir: str, *, num_steps: int | None = None, with_stack: bool = True
    ) -> None: ...

    def stop_profile(self) -> str:
        """Ends the trace; returns its folder."""
        ...

    def stop_admitting(self) -> None:
        """Refuses requests from now on with `EngineStopped`."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left; False if some are after `timeout_s` seconds."""
        ...

    def shutdown(self) -> None: ...
