"""Frames of a stream with `dllm.stream_mode: "denoise"`: what the output looked like at each step.

They stand between the chunks of a stream as objects of their own, never in `delta.content`, so a
client that does not know them still reads the answer. They are provisional: positions at and
behind `committed` may still change, and a rule that edits does change them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jdllm.engine import detokenizer

if TYPE_CHECKING:
    from jdllm.engine import generations
    from jdllm.engine.tokenizer import Tokenizer
    from jdllm.scheduler import text_frames
    from jdllm.scheduler.batch import Frame

OBJECT = "jdllm.denoise"
# For each choice: a frame of a long canvas takes 10 kB, and no eye sees more of them.
MAX_FRAMES_PER_S = 60.0
# An answer may begin with this many frames at any pace, so that short ones are complete.
BURST = 120
CACHED_TOKENS = 1 << 15


class Thinning:
    """Bounds how many frames of a choice are sent; its very last frame always is."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._at_s = now()
        self._allowed = float(BURST)

    def keep(self, frames: Sequence[Frame], *, is_last: bool = False) -> Sequence[Frame]:
        """Returns the frames of an event that are sent, evenly spread, the last one included.

        `is_last`: no event follows.
        """
        at_s = self._now()
        self._allowed = min(BURST, self._allowed + (at_s - self._at_s) * MAX_FRAMES_PER_S)
        self._at_s = at_s
        count = min(len(frames), max(int(is_last), int(self._allowed)))
        self._allowed = max(0.0, self._allowed - count)
        if count == 0:
            return ()
        stride = len(frames) / count
        return [frames[math.ceil((i + 1) * stride) - 1] for i in range(count)]


class Frames:
    """Makes the frames of one answer; `tokenizer` gives each position its text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        def decode(ids: tuple[int, ...]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        self._decode = functools.lru_cache(CACHED_TOKENS)(decode)
        self._thinning: dict[int, Thinning] = {}

    def of(self, index: int, generation: generations.Generation) -> Iterator[dict[str, Any]]:
        """Yields what the frames of an event have beside the fields of every chunk."""
        if index not in self._thinning:
            self._thinning[index] = Thinning()
        is_last = generation.finish_reason is not None
        for one in self._thinning[index].keep(generation.frames, is_last=is_last):
            yield {
                "index": index,
                "step": one.step,
                "start": one.value.start,
                "committed": one.value.num_final,
                "canvas": self._canvas(one.value),
            }

    def _canvas(self, frame: text_frames.TextFrame) -> list[dict[str, Any]]:
        texts = detokenizer.texts_of_positions(frame.token_ids, self._decode)
        return [
            {
                "id": token_id,
                "text": text,
                "conf": None if logprob is None else round(math.exp(min(logprob, 0.0)), 4),
            }
            for token_id, text, logprob in zip(frame.token_ids, texts, frame.logprobs, strict=True)
        ]
