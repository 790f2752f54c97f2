"""What a kind of rows is to the launch machinery: programs, and the memory they share.

A kind is a folder beside this one. It says what lies on the device between launches, and which
program a bucket stands for; compiling, transfers, launches and their ends know nothing more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from jdllm.runner.launch import interrupts
from jdllm.scheduler import batch as batch_lib

Params = Mapping[str, jax.Array]
# What stays on the device from launch to launch, by name: KV pools, states of rows.
Memory = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled function of a kind, and its two ends on the host.

    `step` (params, memory, inputs) -> (memory, outputs) is pure; its memory has the parts named
    in `uses`, which are donated. `inputs` pads a batch to its bucket, as numpy arrays; `results`
    says what the outputs, as numpy arrays, mean for the rows of the batch. Inputs and outputs are
    trees of bool and 32-bit arrays.
    """

    step: Callable[[Params, Memory, Any], tuple[Memory, Any]]
    uses: tuple[str, ...]
    inputs: Callable[[batch_lib.ScheduleBatch, interrupts.Interrupt], Any]
    results: Callable[[Any, batch_lib.ScheduleBatch], batch_lib.LaunchResult]


class Kind(Protocol):
    """The device side of a kind of rows."""

    def create_memory(self) -> Memory:
        """Returns what launches share, as a runner has it that has served nothing."""
        ...

    def program(self, bucket: batch_lib.Bucket) -> Program:
        """Returns what launches of a bucket run."""
        ...
