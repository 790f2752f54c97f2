"""What one answer looked like step by step, made of the frames of a stream that shows its steps.

Each frame is one denoising step, and what differs from the frame before is what this step decided.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from jdllm.engine import detokenizer

if TYPE_CHECKING:
    from jdllm.engine import generations
    from jdllm.scheduler.batch import Frame

Decode = Callable[[tuple[int, ...]], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One position that a step wrote; positions count from the beginning of the output.

    `confidence` is the probability that the model gave the token in this step, None where it gave
    none. `replaced` is the token that stood there before, for rules that edit.
    """

    position: int
    token_id: int
    text: str
    confidence: float | None
    replaced: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One denoising step: what it decided, and the whole output after it.

    `number` counts the steps of the answer from 1; `step` is its number within its block, or, with
    full attention, within the canvas, as in `return_step_map`. `token_ids` is None where nothing
    is written yet, and `texts` is empty there. The first `num_final` tokens never change again.
    """

    number: int
    step: int
    decided: tuple[Decision, ...]
    token_ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    num_final: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSteps:
    """One answer and its steps.

    `texts` has the text of each output token, special ones included. `decided_at` has the number
    of the step that wrote it, 0 for tokens that were given, and `confidences` its confidence then.
    `text`, `output_ids` and `meta_info` are those of `Engine.generate`.
    """

    text: str
    output_ids: tuple[int, ...]
    texts: tuple[str, ...]
    decided_at: tuple[int, ...]
    confidences: tuple[float | None, ...]
    steps: tuple[Step, ...]
    meta_info: dict[str, Any]

    @classmethod
    def of(cls, frames: Sequence[Frame], answer: generations.Generation, decode: Decode) -> Self:
        """Returns the steps of a finished answer, which has a step map, from all its frames.

        Positions behind the end of the output are no output, so steps leave them out.
        """
        length = len(answer.output_ids)
        given = {i for i, step in enumerate(answer.meta_info["step_map"]) if step == 0}
        steps: list[Step] = []
        shown: list[int | None] = []
        decided_at = [0] * length
        confidences: list[float | None] = [None] * length
        for frame in frames:
            before, first = list(shown), frame.value.start
            shown[first:] = frame.value.token_ids
            del shown[length:]
            texts = detokenizer.texts_of_positions(shown, decode)
            decided = []
            for i, token_id in enumerate(shown[first:], first):
                old = before[i] if i < len(before) else None
                if token_id is None or token_id == old or i in given:
                    continue
                logprob = frame.value.logprobs[i - first]
                decision = Decision(
                    position=i,
                    token_id=token_id,
                    text=texts[i],
                    confidence=None if logprob is None else math.exp(min(logprob, 0.0)),
                    replaced=old,
                )
                decided.append(decision)
                decided_at[i], confidences[i] = len(steps) + 1, decision.confidence
            steps.append(
                Step(
                    number=len(steps) + 1,
                    step=frame.step,
                    decided=tuple(decided),
                    token_ids=tuple(shown),
                    texts=tuple(texts),
                    num_final=min(frame.value.num_final, length),
                )
            )
        return cls(
            text=answer.text,
            output_ids=tuple(answer.output_ids),
            texts=tuple(detokenizer.texts_of_positions(answer.output_ids, decode)),
            decided_at=tuple(decided_at),
            confidences=tuple(confidences),
            steps=tuple(steps),
            meta_info=answer.meta_info,
        )
