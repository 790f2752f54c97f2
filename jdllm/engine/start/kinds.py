"""The kinds of rows: one entry each, which names the host's side and the device's side.

A kind is a file in `scheduler/rows/`, a folder in `runner/`, and an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jdllm import errors
from jdllm.device import facts
from jdllm.runner.block.kind import BlockKind
from jdllm.runner.canvas.kind import CanvasKind
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.runner.uniform.kind import UniformKind
from jdllm.scheduler.rows import block, canvas, interface, uniform
from jdllm.spec import ModelSpec

# (graphdef, static options, facts of the device) -> the device's side of a kind.
BuildKind = Callable[[Any, StepConfig, facts.DeviceFacts], program.Kind]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KindOfRows:
    """How the host plans rows of a kind, and which programs the device runs for them.

    `exchanges_logits`: on several devices, a step may need the logits of a whole block on each.
    """

    rows: type[interface.Rows]
    device: BuildKind
    exchanges_logits: bool = True


KINDS: dict[str, KindOfRows] = {
    "block": KindOfRows(
        rows=block.BlockRows,
        device=BlockKind,
    ),
    "canvas": KindOfRows(
        rows=canvas.CanvasRows,
        device=CanvasKind,
    ),
    "uniform": KindOfRows(
        rows=uniform.UniformRows,
        device=UniformKind,
        exchanges_logits=False,
    ),
}


def kind_of(spec: ModelSpec) -> KindOfRows:
    """Returns the kind of a model's rows; raises a ConfigError if no kind can run the model."""
    kind = spec.diffusion.kind
    if kind is None:
        raise errors.ConfigError(
            f"{spec.architecture}: serving without a mask token with "
            f"{spec.diffusion.attention_pattern.value} attention is not supported"
        )
    return KINDS[kind]
