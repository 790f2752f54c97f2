"""What scheduler and runner say to one another: a batch down, row results up."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

import numpy as np

from jdllm.scheduler import request as request_lib

# Where a row's tokens may begin in a packed forward of canvases.
CANVAS_ALIGNMENT = 8


class Phase(enum.StrEnum):
    """A launch is of one phase: whole committed blocks, blocks or canvases being denoised."""

    PREFILL = "prefill"
    DECODE = "decode"
    CANVAS = "canvas"


def packed_len(num_tokens: int) -> int:
    """Returns what a canvas of `num_tokens` takes at most of the tokens of a forward."""
    return -(-num_tokens // CANVAS_ALIGNMENT) * CANVAS_ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A compiled shape: `rows` of page tables and `tokens` packed query tokens.

    Canvases: the most tokens of one forward; the rows' `packed_len` together never exceed it. With
    `is_whole` every forward is of so many tokens, whatever the rows need.
    """

    phase: Phase
    rows: int
    tokens: int
    is_whole: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One request's part of a launch.

    Prefill: its `num_tokens` tokens from position `start`. Decode: the row state in its
    slot, or with `is_fresh` its first block at `start`. Canvas: the row state in its slot, or
    with `is_fresh` the request's `canvas_ids`; `start` is 0 and `num_tokens` their number.
    `epoch` is the request's when the launch was planned.
    """

    request: request_lib.Request
    start: int
    num_tokens: int
    epoch: int
    is_fresh: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBatch:
    """Rows of one launch, in order, and the bucket they are padded to.

    A decode or canvas launch runs up to `max_steps` steps; it ends when more than `max_finished` of
    its rows are finished, because others wait for their places (None: nobody does).
    """

    rows: tuple[ScheduledRow, ...]
    bucket: Bucket
    max_steps: int = 1
    max_finished: int | None = None

    @property
    def phase(self) -> Phase:
        return self.bucket.phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBlock:
    """A block whose tokens became final, and the row's forwards of the launch until then.

    Of a canvas: the tokens that became settled in the launch, which are those before its first
    masked position; after the prompt, before the suffix, in order. The first launch of a fresh
    row begins with the first position after the prompt, whoever wrote it.

    `steps` and `logprobs`, per token: the step of the block that wrote it, from 1, and the
    model's log-probability of it in that step; they mean nothing for the prompt's tokens.
    """

    tokens: np.ndarray
    nfe: int
    steps: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One decode or canvas row after a launch.

    `committed` are the blocks that became final, in order, at most one of a canvas;
    `context_len` tokens have final K,V, none of a canvas. `nfe` counts the row's forwards.
    `is_invalid`: the statistics are not numbers (broken weights, overflow).
    """

    committed: tuple[CommittedBlock, ...]
    context_len: int
    nfe: int
    num_edited: int = 0
    is_invalid: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """One result per decode or canvas row, in order, and what its steps forwarded.

    `num_slots` block slots in all `num_steps` steps, padding included, `used_slots` of
    them for a row. Canvases: tokens instead of block slots; `num_full` counts the forwards of a
    row that took its whole canvas.
    """

    rows: tuple[RowResult, ...] = ()
    num_steps: int = 0
    num_slots: int = 0
    used_slots: int = 0
    num_full: int = 0


class Launch(Protocol):
    """A launch under way."""

    def is_ready(self) -> bool:
        """Returns whether `result` would not wait."""
        ...

    def result(self) -> LaunchResult:
        """Waits for it; raises what it failed with. The result of a prefill has no rows."""
        ...


class Runner(Protocol):
    """Executes batches in the order of their launches."""

    def launch(self, batch: ScheduleBatch) -> Launch:
        """Starts a launch and returns at once."""
        ...

    def begin_round(self) -> None:
        """Lets `interrupt` end, from now on, also the next launch, which is not planned yet."""
        ...

    def interrupt(self) -> None:
        """Lets launches under way end after the step they are in, if it can; from any thread."""
        ...

    def reset(self) -> None:
        """Makes the runner usable after a failed launch; all K,V and row states are lost."""
        ...
