"""What scheduler and runner say to one another: a batch down, row results up."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

import numpy as np

from jdllm.scheduler import request as request_lib


class Phase(enum.StrEnum):
    """A launch is of one phase: whole committed blocks, or one block being denoised."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A compiled shape: `rows` of page tables and `tokens` packed query tokens."""

    phase: Phase
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """`num_tokens` tokens of one request from position `start`, which is its context length."""

    request: request_lib.Request
    start: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBatch:
    """Rows of one launch, in order, and the bucket they are padded to.

    A decode launch runs up to `max_steps` steps; with `yields_on_finish` it ends when a
    row finishes, because others wait for its place.
    """

    rows: tuple[ScheduledRow, ...]
    bucket: Bucket
    max_steps: int = 1
    yields_on_finish: bool = False

    @property
    def phase(self) -> Phase:
        return self.bucket.phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBlock:
    """A block whose tokens became final, and the row's forwards of the launch until then."""

    tokens: np.ndarray
    nfe: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One decode row after a launch.

    `committed` are the blocks that became final, beginning with the block that the row
    came with unless that was final before. `block` is in flight now, behind
    `context_len` tokens of final K,V; it is the last committed one while its K,V is not
    final. `nfe` counts the row's forwards.
    `is_invalid`: the statistics are not numbers (broken weights, overflow); the block in
    flight means nothing.
    """

    committed: tuple[CommittedBlock, ...]
    block: request_lib.BlockRow
    context_len: int
    nfe: int
    num_edited: int = 0
    is_invalid: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """One result per decode row, in order, and what its steps forwarded.

    `num_slots` block slots in all `num_steps` steps, padding included, `used_slots` of
    them for a row.
    """

    rows: tuple[RowResult, ...] = ()
    num_steps: int = 1
    num_slots: int = 0
    used_slots: int = 0


class Runner(Protocol):
    """Executes batches; the result of a prefill has no rows."""

    def execute(self, batch: ScheduleBatch) -> LaunchResult: ...
