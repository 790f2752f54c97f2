"""What scheduler and runner say to one another: a batch down, row results up.

Neither side knows a kind of rows. A kind subclasses `Bucket` for each program it has; its rows
(`scheduler/rows/`) put buckets into batches, and its device side (`runner/`) compiles a program
for each and turns what the program returns into a `LaunchResult`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import numpy as np

from jdllm.scheduler import request as request_lib
from jdllm.scheduler import stay as stay_lib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A compiled shape: `rows` of a launch and `tokens` of its largest forward.

    `name` is for logs. `denoises`: launches of it write output; others make rows ready for that.
    """

    name: ClassVar[str]
    denoises: ClassVar[bool] = True

    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One request's part of a launch.

    Its `num_tokens` tokens from position `start`. With `is_fresh` the row begins on the device,
    otherwise it goes on from the state in its slot. `stay` is the request's when the launch was
    planned.
    """

    request: request_lib.Request
    stay: stay_lib.Stay
    start: int
    num_tokens: int
    is_fresh: bool = False

    @property
    def is_current(self) -> bool:
        """Whether the request still holds what it held when the launch was planned."""
        return self.request.stay is self.stay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBatch:
    """Rows of one launch, in order, and the bucket they are padded to.

    A launch that denoises runs up to `max_steps` steps; it ends when more than `max_finished` of
    its rows are finished, because others wait for their places (None: nobody does).
    """

    rows: tuple[ScheduledRow, ...]
    bucket: Bucket
    max_steps: int = 1
    max_finished: int | None = None


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
class Frame:
    """What a row looked like after one of its steps, counted from 1; `value` is its kind's."""

    step: int
    value: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One row after a launch.

    `nfe` counts the row's forwards. `committed` are the blocks that became final, in order, at
    most one of a canvas. `context_len` tokens have final K,V; None where the launch does not say.
    `frames` are outputs of single steps, for kinds that give any. `product` is what a row has
    made that does not write tokens, once it is finished. `is_invalid`: the statistics are not
    numbers (broken weights, overflow).
    """

    nfe: int = 0
    committed: tuple[CommittedBlock, ...] = ()
    context_len: int | None = None
    num_edited: int = 0
    frames: tuple[Frame, ...] = ()
    product: Any = None
    is_invalid: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """One result per row, in order, and what the launch forwarded.

    Its `num_steps` steps forwarded `computed_tokens`, padding included, `real_tokens` of them
    for a row; `denoised_tokens` were of rows that denoise. Of these `canvas_tokens` belong to
    canvases, which had `num_full` forwards of a row's whole canvas.
    """

    rows: tuple[RowResult, ...] = ()
    num_steps: int = 0
    computed_tokens: int = 0
    real_tokens: int = 0
    denoised_tokens: int = 0
    canvas_tokens: int = 0
    num_full: int = 0


class Launch(Protocol):
    """A launch under way."""

    def is_ready(self) -> bool:
        """Returns whether `result` would not wait."""
        ...

    def result(self) -> LaunchResult:
        """Waits for it; raises what it failed with."""
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
