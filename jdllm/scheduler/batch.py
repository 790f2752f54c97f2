"""What scheduler and runner say to one another: a batch down, row results up."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Protocol

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
    """Rows of one launch, in order, and the bucket they are padded to."""

    rows: tuple[ScheduledRow, ...]
    bucket: Bucket

    @property
    def phase(self) -> Phase:
        return self.bucket.phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One decode row after a step.

    `is_final`: the block's tokens will not change any more. `is_done`: moreover the
    K,V that this step wrote belongs to those tokens, so the context may advance.
    `is_invalid`: the statistics are not numbers (broken weights, overflow); the tokens
    mean nothing.
    """

    tokens: np.ndarray
    masked: np.ndarray
    is_final: bool
    is_done: bool
    num_edited: int = 0
    is_invalid: bool = False
    extra: Any = None


class Runner(Protocol):
    """Executes batches; prefill returns no rows, decode one result per row in order."""

    def execute(self, batch: ScheduleBatch) -> tuple[RowResult, ...]: ...
