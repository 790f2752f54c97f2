"""The kinds of rows: one entry each, which names the host's side and the device's side.

A kind is a file in `scheduler/rows/`, a folder in `runner/`, and an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jdllm import device_facts, errors
from jdllm import spec as spec_lib
from jdllm.runner import config as config_lib
from jdllm.runner.block import kind as block_kind
from jdllm.runner.canvas import kind as canvas_kind
from jdllm.runner.launch import program
from jdllm.runner.uniform import kind as uniform_kind
from jdllm.scheduler.rows import block, canvas, interface, uniform

# (graphdef, static options, facts of the device) -> the device's side of a kind.
BuildKind = Callable[[Any, config_lib.StepConfig, device_facts.DeviceFacts], program.Kind]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KindOfRows:
    """How the host plans rows of a kind, and which programs the device runs for them.

    `splits`: the programs also run on several devices.
    """

    rows: type[interface.Rows]
    device: BuildKind
    splits: bool = True


KINDS: dict[str, KindOfRows] = {
    "block": KindOfRows(
        rows=block.BlockRows,
        device=block_kind.BlockKind,
    ),
    "canvas": KindOfRows(
        rows=canvas.CanvasRows,
        device=canvas_kind.CanvasKind,
    ),
    "uniform": KindOfRows(
        rows=uniform.UniformRows,
        device=uniform_kind.UniformKind,
        splits=False,
    ),
}


def kind_of(spec: spec_lib.ModelSpec, tp_size: int = 1) -> KindOfRows:
    """Returns the kind of a model's rows; raises a ConfigError if no kind can run the model.

    `tp_size` is the number of devices that share the model.
    """
    kind = spec.diffusion.kind
    if kind is None:
        raise errors.ConfigError(
            f"{spec.architecture}: serving with {spec.diffusion.attention_pattern.value} attention "
            "is not supported"
        )
    found = KINDS[kind]
    if tp_size > 1 and not found.splits:
        raise errors.ConfigError(
            f"tp_size={tp_size}: {spec.architecture} runs on one device only; use tp_size 1"
        )
    return found
