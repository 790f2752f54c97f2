"""What the launch machinery knows of a kind of rows: its programs, and the memory they share.

A kind is a folder beside this one. It says what stays on the device between launches, and which
program each bucket runs. The code that compiles, transfers, launches and ends launches knows
nothing more of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import Bucket, LaunchResult, ScheduleBatch

Params = Mapping[str, Any]  # arrays by path, and what a step over ranks needs (`over_mesh`)
# What stays on the device from launch to launch, by name: KV pools and states of rows.
Memory = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled function of a kind, and the host functions before and after it.

    `step` (params, memory, inputs) -> (memory, outputs) is pure. Its memory has the parts named
    in `uses`, which are donated. `inputs` turns a batch into numpy arrays, padded to the bucket.
    `results` turns the outputs, as numpy arrays, into results for the rows of the batch. Inputs
    and outputs are trees of bool and 32-bit arrays.
    """

    step: Callable[[Params, Memory, Any], tuple[Memory, Any]]
    uses: tuple[str, ...]
    inputs: Callable[[ScheduleBatch, interrupts.Interrupt], Any]
    results: Callable[[Any, ScheduleBatch], LaunchResult]


class Kind(Protocol):
    """The device side of a kind of rows."""

    def create_memory(self) -> Memory:
        """Returns what launches share, in the state before the first launch."""
        ...

    def program(self, bucket: Bucket) -> Program:
        """Returns the program that launches of this bucket run."""
        ...
