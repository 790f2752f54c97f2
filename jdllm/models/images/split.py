"""A component over ranks: transformers are split by heads and width, all else every rank has whole.

A rank computes its heads of each attention and its part of each feed-forward, for all tokens, and
the two products that end them are summed over the ranks. What the timestep makes (modulations) is
of all channels, and so on every rank. Text encoders and autoencoders run whole on every rank.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from jdllm import errors
from jdllm.device import sharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig(abc.ABC):
    """The config of a transformer that ranks may share, whole; modules are those of one rank."""

    num_ranks: int = 1

    @property
    @abc.abstractmethod
    def heads(self) -> sharding.Heads:
        """The heads of every attention, those of all ranks."""

    @property
    @abc.abstractmethod
    def feed_forward_width(self) -> int:
        """The hidden numbers of every feed-forward, those of all ranks."""

    def over(self, tp: int) -> Self:
        """Returns the config of the modules that run on each of `tp` ranks."""
        return dataclasses.replace(self, num_ranks=tp)

    def problem(self, tp: int) -> str | None:
        """Returns why `tp` ranks cannot share the transformer, or None."""
        sizes = {"heads": self.heads.query, "feed-forward columns": self.feed_forward_width}
        for name, size in sizes.items():
            if size % tp:
                return f"{size} {name} cannot be divided by {tp}"
        return None


def check(config: object, tp: int) -> None:
    """Raises a ConfigError, with the sizes that would work, if ranks cannot share a component."""
    if not isinstance(config, SplitConfig) or (problem := config.problem(tp)) is None:
        return
    fits = [str(size) for size in sharding.SIZES if config.problem(size) is None]
    raise errors.ConfigError(f"tp_size={tp}: {problem}; use tp_size {', '.join(fits)}")


def local_config(config: Any, tp: int) -> Any:
    """Returns the config of the component that each of `tp` ranks has."""
    return config.over(tp) if isinstance(config, SplitConfig) else config


def cuts(
    config: object, shapes: Mapping[str, jax.ShapeDtypeStruct], tp: int
) -> dict[str, sharding.Cut | None]:
    """Returns how each parameter of a whole component is cut; None: every rank holds it whole."""
    if not isinstance(config, SplitConfig):
        return dict.fromkeys(shapes)
    shards = sharding.Shards(tp=tp)
    return {
        path: sharding.cut_of(path, one.shape, config.heads, shards) for path, one in shapes.items()
    }
