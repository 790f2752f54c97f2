"""What a row of text looks like after a step, for requests that ask to see their denoising.

Block rows get their frames from the device, which keeps the blocks of a launch's steps
(`runner/block/frames.py`), because a rule may rewrite a position. A canvas needs nothing of the
kind: a position is written once, so the steps that wrote the tokens say what every frame was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jdllm.scheduler.batch import Frame
from jdllm.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextFrame:
    """The positions of an output from number `start` on, as they were after a step.

    `token_ids` is None where nothing is written yet. `logprobs` are those of the steps that wrote
    the tokens; None where nothing is written, and for tokens that were given. The first `num_final`
    tokens of the output never change again.
    """

    start: int
    token_ids: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    num_final: int

    @classmethod
    def of(
        cls,
        start: int,
        token_ids: Int32[np.ndarray, " T"],
        logprobs: Float32[np.ndarray, " T"],
        *,
        is_written: np.ndarray,
        has_step: np.ndarray,
        num_final: int,
    ) -> TextFrame:
        """Returns the frame of positions from `start` on; the masks are boolean, [T]."""
        return cls(
            start=start,
            token_ids=_where(token_ids, is_written),
            logprobs=_where(logprobs, is_written & has_step),
            num_final=num_final,
        )

    def cut(self, length: int) -> TextFrame:
        """Returns the frame of an output that ends after `length` tokens."""
        kept = max(0, length - self.start)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:kept],
            logprobs=self.logprobs[:kept],
            num_final=length,
        )


def _where(values: np.ndarray, condition: np.ndarray) -> tuple[Any, ...]:
    return tuple(
        value if is_known else None
        for value, is_known in zip(values.tolist(), condition.tolist(), strict=True)
    )


def ending(frames: Sequence[Frame], length: int) -> tuple[Frame, ...]:
    """Returns the frames of the launch in which an output ended after `length` tokens.

    Later blocks are left out, and the last frame has the tokens of the output and no more.
    """
    shown = [one for one in frames if one.value.start < length]
    if shown:
        shown[-1] = dataclasses.replace(shown[-1], value=shown[-1].value.cut(length))
    return tuple(shown)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasPicture:
    """A canvas after a launch: its output positions, from the prompt's end on.

    `steps` is the step that wrote a token, 0 where none did. `is_masked`: not written yet.
    """

    token_ids: Int32[np.ndarray, " T"]
    steps: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    is_masked: np.ndarray

    def frames(
        self,
        request: Request,
        canvas_ids: Sequence[int | None],
        num_settled: int,
        after_step: int,
    ) -> tuple[Frame, ...]:
        """Returns a frame for each step after `after_step` that wrote something.

        `canvas_ids` is the whole canvas as it began, None where nothing was given; `num_settled`
        positions of the output were settled before. A frame ends
        with the first end token that is written. So it never shows what fills a canvas behind it.
        (A rule may fill in tokens that were written there before; a frame of an earlier step then
        has the filling, if its launch also saw the end token.)
        """
        frames, start, first = [], num_settled, len(request.prompt_ids)
        places = canvas_ids[first : first + len(self.token_ids)]
        given = np.array([token is not None for token in places], bool)
        has_step, is_end = self.steps > 0, np.isin(self.token_ids, request.end_token_ids)
        for step in np.unique(self.steps[(self.steps > after_step) & ~self.is_masked]).tolist():
            is_written = ~self.is_masked & (given | (has_step & (self.steps <= step)))
            shown = slice(start, _first(is_written & is_end) + 1)
            num_final = min(_first(~is_written), shown.stop)
            frame = TextFrame.of(
                start,
                self.token_ids[shown],
                self.logprobs[shown],
                is_written=is_written[shown],
                has_step=has_step[shown],
                num_final=num_final,
            )
            frames.append(Frame(step=step, value=frame))
            start = num_final
        return tuple(frames)


def _first(condition: np.ndarray) -> int:
    """Returns the first place where the condition holds, or the number of places."""
    (places,) = np.nonzero(condition)
    return int(places[0]) if len(places) else len(condition)
