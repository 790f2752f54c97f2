"""The options of an application of replicas: those of `jdllm serve`, and how many and where.

`serve run MODULE:build key=value` gives every value as text, a YAML file gives typed ones. Both are
checked against the field's type.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from jdllm import errors
from jdllm.options import hints as option_hints
from jdllm.options.config import EngineConfig, ServerConfig
from jdllm.server import cli

Part = typing.TypeVar("Part")
# Fields of `ServerConfig` that Ray Serve has in its own hands.
SERVES_OWN = {
    "host": "set `http_options: {host: ...}` in the YAML file of `serve deploy`, or use "
    "`jdllm serve --replicas N --host ...`",
    "port": "set `http_options: {port: ...}` in the YAML file of `serve deploy`, or use "
    "`jdllm serve --replicas N --port ...`",
    "replicas": "its name here is num_replicas",
    "timeout_keep_alive": "set `http_options: {keep_alive_timeout_s: ...}` of Ray Serve",
    "drain_timeout_s": "its name here is graceful_shutdown_timeout_s",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How many replicas there are, and what each may take.

    `num_gpus` and `num_cpus` are Ray's resources of a replica; without `num_gpus` a replica takes
    `tp_size` GPUs where there are any. `affinity_margin` is how many choices more than the least
    busy replica one may hold and still get a request because of its prefix cache (default: half of
    the requests that a replica runs at a time). With `max_replicas` Ray Serve scales between
    `min_replicas` and it, towards `target_ongoing_requests` HTTP requests for each replica
    (default: max_running_requests). A replica that is to stop has `graceful_shutdown_timeout_s` for
    its requests.
    """

    num_replicas: int = 1
    num_gpus: float | None = None
    num_cpus: float = 1.0
    affinity_margin: int | None = None
    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: float | None = None
    graceful_shutdown_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("num_replicas", "min_replicas"):
            if getattr(self, name) < 1:
                raise errors.ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise errors.ConfigError(
                f"max_replicas={self.max_replicas} must be min_replicas={self.min_replicas} or more"
            )
        if self.max_replicas is not None and self.num_replicas != 1:
            raise errors.ConfigError("give either num_replicas or max_replicas, not both")
        if self.max_replicas is None and self.min_replicas != 1:
            raise errors.ConfigError("min_replicas needs max_replicas")
        if self.affinity_margin is not None and self.affinity_margin < 0:
            raise errors.ConfigError(f"affinity_margin={self.affinity_margin} must be 0 or more")
        if self.target_ongoing_requests is not None and not self.target_ongoing_requests > 0:
            raise errors.ConfigError(
                f"target_ongoing_requests={self.target_ongoing_requests} must be above 0"
            )
        for name in ("num_gpus", "num_cpus", "graceful_shutdown_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise errors.ConfigError(f"{name}={value} must be 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of one application."""

    engine: EngineConfig
    server: ServerConfig
    replicas: ReplicaConfig

    def autoscaling(self) -> dict[str, Any] | None:
        """Returns Ray Serve's `autoscaling_config`, None for a fixed number of replicas."""
        replicas = self.replicas
        if replicas.max_replicas is None:
            if replicas.target_ongoing_requests is not None:
                raise errors.ConfigError("target_ongoing_requests needs max_replicas")
            return None
        target = replicas.target_ongoing_requests or self.engine.max_running_requests
        if target is None:
            raise errors.ConfigError(
                "max_replicas needs target_ongoing_requests or max_running_requests: how many "
                "requests a replica should have"
            )
        return {
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": target,
        }


def parse(arguments: Mapping[str, Any]) -> Options:
    """Returns the options that an application's arguments give; a ConfigError names a wrong one."""
    parts = (EngineConfig, ServerConfig, ReplicaConfig)
    hints = {name: hint for part in parts for name, hint in typing.get_type_hints(part).items()}
    for name in SERVES_OWN:
        del hints[name]
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        name = str(key).replace("-", "_")
        name = cli.ALIASES.get(name, name)
        if name in SERVES_OWN:
            raise errors.ConfigError(f"{key} is no option of an application: {SERVES_OWN[name]}")
        if name not in hints:
            raise errors.ConfigError(f"unknown option {key!r}{option_hints.of_start(name, hints)}")
        if name in values:
            raise errors.ConfigError(f"{key} repeats option {name}")
        values[name] = _typed(name, value, hints[name])

    def made(part: type[Part]) -> Part:
        return part(
            **{name: values[name] for name in typing.get_type_hints(part) if name in values}
        )

    return Options(
        engine=made(EngineConfig),
        server=made(ServerConfig),
        replicas=made(ReplicaConfig),
    )


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Returns a value of the field's type; text may stand for a number or for true and false."""
    try:
        return pydantic.TypeAdapter(hint).validate_python(value, strict=not isinstance(value, str))
    except pydantic.ValidationError as error:
        shown = name if name in cli.SECRETS else f"{name}={errors.quote(value)}"
        raise errors.ConfigError(f"{shown}: {error.errors()[0]['msg']}") from None
