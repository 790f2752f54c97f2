"""What scheduler and runner exchange: a batch goes to the runner, row results come back.

Neither side knows a kind of rows. A kind subclasses `Bucket` for each of its programs. Its rows
(`scheduler/rows/`) choose the bucket of a batch. Its device side (`runner/`) compiles a program
for each bucket and turns the program's outputs into a `LaunchResult`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from jdllm.scheduler.request import Request
from jdllm.scheduler.stay import Stay

NO_ID = -1  # in `CommittedBlock.top_ids`, where a list has no more tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A compiled shape: `rows` of a launch and `tokens` of its largest forward.

    `name` is for logs. Launches of a bucket that `denoises` write output; other launches prepare
    rows for that. `with_logits`: some of the rows may need their logits.
    """

    name: ClassVar[str]
    denoises: ClassVar[bool] = True

    rows: int
    tokens: int
    with_logits: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRow:
    """One request's part of a launch: its `num_tokens` tokens from position `start`.

    With `is_fresh` the row begins with this launch, otherwise it goes on from the state in its
    slot. `stay` is what the request held when the launch was planned.
    """

    request: Request
    stay: Stay
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

    A launch that denoises runs up to `max_steps` steps. It ends early when more than
    `max_finished` of its rows are finished, because other requests wait for their places (None:
    no request waits).
    """

    rows: tuple[ScheduledRow, ...]
    bucket: Bucket
    max_steps: int = 1
    max_finished: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Says that no launch can start now, although requests are live.

    It can after `seconds`, or after an arrival. Infinite: only when launches in flight have ended.
    """

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBlock:
    """A block whose tokens became final; `nfe` counts the row's forwards of the launch until then.

    For a canvas these are the tokens that settled in the launch: in order, those before the first
    masked position, after the prompt and before the suffix. The first launch of a fresh row
    reports from the first position after the prompt on, also tokens that were given.

    For each token, `steps` says which step of the block wrote it, counted from 1, and `logprobs`
    the model's log-probability of the token in that step. For tokens of the prompt both are
    meaningless. `top_ids` and `top_logprobs` list the most probable tokens of that step, if a row
    of the launch needs its logits.
    """

    tokens: Int32[np.ndarray, " T"]
    nfe: int
    steps: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    top_ids: Int32[np.ndarray, "T K"] | None = None
    top_logprobs: Float32[np.ndarray, "T K"] | None = None

    def top_tokens(self, part: slice, count: int) -> list[list[tuple[int, float]]]:
        """Returns up to `count` (id, log-probability) for each token of a part of the block.

        The token itself has the log-probability that `logprobs` says. The lists come from another
        pass over the vocabulary, which may round differently.
        """
        if count == 0:
            return []
        assert self.top_ids is not None and self.top_logprobs is not None, "the row needs logits"
        columns = (
            self.tokens[part], self.logprobs[part],
            self.top_ids[part, :count], self.top_logprobs[part, :count],
        )  # fmt: skip
        return [
            [
                (i, own if i == token else p)
                for i, p in zip(ids, logprobs, strict=True)
                if i != NO_ID
            ]
            for token, own, ids, logprobs in zip(*(c.tolist() for c in columns), strict=True)
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a row looked like after step number `step`, counted from 1; its kind defines `value`."""

    step: int
    value: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One row after a launch.

    `nfe` counts the row's forwards. `committed` holds the blocks that became final, in order; a
    canvas has at most one. `context_len` tokens have final K,V; None if the launch does not say.
    `num_skipped` counts the steps of `nfe` that left out most of the model.
    `frames` are outputs of single steps, for kinds that have them. `product` is the result of a
    finished row that writes no tokens. `is_invalid`: the statistics are NaN (broken weights,
    overflow).
    """

    nfe: int = 0
    committed: tuple[CommittedBlock, ...] = ()
    context_len: int | None = None
    num_edited: int = 0
    num_skipped: int = 0
    frames: tuple[Frame, ...] = ()
    product: Any = None
    is_invalid: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """One result per row, in order, and what the launch forwarded.

    Its `num_steps` steps forwarded `computed_tokens` tokens, padding included. Of these,
    `real_tokens` belonged to rows, `denoised_tokens` to rows that denoise, and `canvas_tokens`
    to canvases. `num_full` counts the forwards of a row's whole canvas.
    """

    rows: tuple[RowResult, ...] = ()
    num_steps: int = 0
    computed_tokens: int = 0
    real_tokens: int = 0
    denoised_tokens: int = 0
    canvas_tokens: int = 0
    num_full: int = 0


class NotCompiled(RuntimeError):
    """A launch did not begin, because its program could not be compiled: no memory has changed."""


class Launch(Protocol):
    """A running launch."""

    def is_ready(self) -> bool:
        """Returns whether `result` would not wait."""
        ...

    def result(self) -> LaunchResult:
        """Waits for the launch and returns its result; raises the error if it failed."""
        ...


class Runner(Protocol):
    """Executes batches in the order of the calls of `launch`."""

    def launch(self, batch: ScheduleBatch) -> Launch:
        """Starts a launch and returns at once."""
        ...

    def begin_round(self) -> None:
        """From now on `interrupt` also ends the next launch, though it is not planned yet."""
        ...

    def interrupt(self) -> None:
        """Ends running launches after their present step, if the runner can; thread-safe."""
        ...

    def reset(self) -> None:
        """Makes the runner usable after a failed launch; all K,V and row states are lost."""
        ...
