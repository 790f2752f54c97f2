"""What the ingress and the replicas tell each other; everything here can be pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from jdllm import errors, spec
from jdllm.device.facts import DeviceFacts
from jdllm.engine import generations
from jdllm.engine.stats import EngineStats
from jdllm.options import sampling_params
from jdllm.options.config import EngineConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a replica says of its engine once; all replicas of a deployment say the same.

    `default_lengths[i]` is how many tokens a prompt of i tokens gets that sets no limit.
    """

    config: EngineConfig
    device: DeviceFacts
    spec: spec.ModelSpec
    model_name: str
    context_length: int
    max_running_requests: int
    default_lengths: np.ndarray
    server_info: dict[str, Any]
    model_info: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a replica is now, and where its process is."""

    host: str
    pid: int
    stats: EngineStats
    is_alive: bool
    heartbeat_age_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of `TextServing.stream`."""

    prompts: Sequence[Sequence[int]]
    params: Sequence[sampling_params.SamplingParams]
    request_ids: Sequence[str]
    suffix: Sequence[int] = ()
    priority: int | None = None

    @property
    def num_choices(self) -> int:
        return sum(one.n for one in self.params)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a call that the engine refused."""

    error: errors.RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """The end of a call that failed on the device or by a defect."""

    message: str


Item: TypeAlias = generations.Generation | Refusal | Fault


class Lost(Exception):
    """Says that a replica is gone, or cannot be reached; nothing is known of its request."""


class Replicas(Protocol):
    """The replicas of one deployment, by name. Every method may raise `Lost`."""

    def names(self) -> Sequence[str]:
        """Returns the replicas that take requests now, as far as is known."""
        ...

    def stream(self, name: str, call: Call) -> AsyncGenerator[Item, None]:
        """Yields what a replica gives for a call; closing the iterator ends its work."""
        ...

    async def facts(self) -> Facts:
        """Returns what any replica says, as soon as there is one."""
        ...

    async def report(self, name: str) -> Report: ...

    async def abort(self, name: str, request_ids: Sequence[str], *, abort_all: bool) -> int: ...

    async def flush_cache(self, name: str) -> bool: ...
