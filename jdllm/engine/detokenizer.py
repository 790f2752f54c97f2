"""Turns one growing output into text, and never takes back text that it has shown.

While the output grows, two things are held back: an incomplete UTF-8 character at the end, and
a tail that could be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jdllm.engine import prefix_match
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params
from jdllm.scheduler.commits import FinishReason

# A character that is cut between two tokens decodes to at most three replacement characters.
MAX_CUT_CHARACTERS = 3
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def texts_of_positions(
    token_ids: Sequence[int | None], decode: Callable[[tuple[int, ...]], str]
) -> list[str]:
    """Returns the text of each position, empty where nothing is written (None).

    Of a character in several tokens the first has it, and the others are empty.
    """
    texts = ["" if one is None else decode((one,)) for one in token_ids]
    at = 0
    while at < len(texts):
        end = at
        while end < len(texts) and REPLACEMENT in texts[end]:
            end += 1
        if end - at > 1:
            run = tuple(one for one in token_ids[at:end] if one is not None)
            texts[at:end] = [decode(run), *[""] * (end - at - 1)]
        at = max(end, at + 1)
    return texts


class Detokenizer:
    """Turns the committed ids of one request into cumulative text."""

    def __init__(self, tokenizer: Tokenizer, params: sampling_params.SamplingParams):
        self._tokenizer = tokenizer
        self._params = params
        self.text = ""
        self._stops = [prefix_match.PrefixMatch(stop) for stop in dict.fromkeys(params.stop)]
        self._settled = ""  # what the matches of `_stops` have been fed

    def update(self, output_ids: Sequence[int], finish: FinishReason | None) -> str:
        """Returns the text that became certain; `self.text` is all text so far."""
        text = self._full_text(output_ids, finish)
        if finish is None:
            text = text[: len(text) - self._held_back(text)]
        delta = text[len(self.text) :]
        self.text += delta
        return delta

    def _full_text(self, output_ids: Sequence[int], finish: FinishReason | None) -> str:
        skip, trim = self._params.skip_special_tokens, not self._params.no_stop_trim
        if finish is not None and isinstance(finish.matched, int) and trim:
            output_ids = output_ids[:-1]
        text = self._tokenizer.decode(output_ids, skip_special_tokens=skip)
        if finish is not None and isinstance(finish.matched, str):
            # The match ends in the last kept token. The same characters may stand earlier in the
            # text, where a special token between them was skipped: search from the end only.
            before = self._tokenizer.decode(output_ids[:-1], skip_special_tokens=skip)
            slack = len(finish.matched) + MAX_CUT_CHARACTERS
            at = text.find(finish.matched, max(0, len(before) - slack))
            if at >= 0:
                text = text[: at if trim else at + len(finish.matched)]
        return text

    def _held_back(self, text: str) -> int:
        """Returns how many characters at the end may still change or be trimmed."""
        settled = text.rstrip(REPLACEMENT)
        if not settled.startswith(self._settled):
            self._settled = ""
            for stop in self._stops:
                stop.reset()
        for stop in self._stops:
            stop.feed(settled[len(self._settled) :])
        self._settled = settled
        held = len(text) - len(settled)
        return held + max((stop.size for stop in self._stops), default=0)
