"""Where an output ends: the earliest of stop string, end token and token limit.

A block is committed at once, so the new tokens can hold several ends. The end that keeps
the fewest tokens wins; at equal length a stop string wins over an end token, and an end
token over the limit. Text after an end token is never searched.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Sequence

from jdllm.scheduler import commits
from jdllm.scheduler.request import Request, end_tokens

Detokenize = Callable[[Sequence[int]], str]

# A character has up to four bytes, and a byte-level token may hold only one of them.
MAX_BYTES_PER_CHARACTER = 4


def check(
    output_ids: Sequence[int],
    num_new: int,
    *,
    eos_token_ids: Collection[int],
    stop_token_ids: Collection[int],
    ignore_eos: bool,
    stop: Sequence[str],
    max_new_tokens: int,
    detokenize: Detokenize | None,
    min_new_tokens: int = 0,
) -> commits.FinishReason | None:
    """Returns why the output ends within its last `num_new` tokens, or None if it goes on.

    Earlier tokens count as checked. `ignore_eos` concerns the model's `eos_token_ids`,
    not the `stop_token_ids` of the request itself. Stop strings are looked for behind the first
    `min_new_tokens` tokens; end tokens are not written before.
    """
    num_old = len(output_ids) - num_new
    limit = min(len(output_ids), max_new_tokens)
    ends = set(end_tokens(stop_token_ids, eos_token_ids, ignore_eos))
    end_at = next((i for i in range(num_old, limit) if output_ids[i] in ends), None)
    if stop and detokenize is not None:
        bound = limit if end_at is None else end_at + 1
        searched = output_ids[min_new_tokens:bound]
        found = _first_stop_string(searched, max(0, num_old - min_new_tokens), stop, detokenize)
        if found is not None:
            kept = found.finished_len + min_new_tokens
            return dataclasses.replace(found, finished_len=kept)
    if end_at is not None:
        return commits.FinishReason(
            kind="stop", finished_len=end_at + 1, matched=output_ids[end_at]
        )
    if len(output_ids) >= max_new_tokens:
        return commits.FinishReason(kind="length", finished_len=max_new_tokens)
    return None


def check_request(
    request: Request, num_new: int, detokenize: Detokenize | None
) -> commits.FinishReason | None:
    """Returns why the request's output ends within its last `num_new` tokens, or None."""
    sampling = request.sampling
    return check(
        request.output_ids,
        num_new,
        eos_token_ids=request.eos_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        max_new_tokens=request.max_new_tokens,
        detokenize=detokenize,
        min_new_tokens=sampling.min_new_tokens or 0,
    )


def _first_stop_string(
    output_ids: Sequence[int], num_old: int, stop: Sequence[str], detokenize: Detokenize
) -> commits.FinishReason | None:
    """Returns the end at the shortest prefix of more than `num_old` tokens with a stop string."""
    start, num_known = _window(output_ids, num_old, max(map(len, stop)), detokenize)
    if _earliest(detokenize(output_ids[start:]), num_known, stop) is None:
        return None  # A block that does not end costs two decodes of a bounded window.
    lengths = range(num_old + 1, len(output_ids) + 1)

    def match(length: int) -> str | None:
        return _earliest(detokenize(output_ids[start:length]), num_known, stop)

    # A longer text still holds the stop string, so a binary search needs few decodes.
    place = bisect.bisect_left(lengths, True, key=lambda length: match(length) is not None)
    if place == len(lengths):
        return None
    return commits.FinishReason(
        kind="stop", finished_len=lengths[place], matched=match(lengths[place])
    )


def _window(
    output_ids: Sequence[int], num_old: int, longest: int, detokenize: Detokenize
) -> tuple[int, int]:
    """Returns (the token to decode from, the length of the text from there to the new tokens).

    The window cuts no match that ends in new tokens: its old text has `longest` characters, and
    a few that may be wrong, because the window starts inside a character or at a leading space,
    and the new tokens may complete the last character. Tokens of several characters make
    the window shorter than its text, tokens without text (special tokens that the tokenizer
    skips) make it longer.
    """
    wanted = longest + 2 * MAX_BYTES_PER_CHARACTER
    span = wanted
    while True:
        start = max(0, num_old - span)
        num_known = len(detokenize(output_ids[start:num_old]))
        if start == 0 or num_known >= wanted:
            return start, num_known
        span *= 2


def _earliest(text: str, num_known: int, stop: Sequence[str]) -> str | None:
    """Returns the stop string that begins first in `text`; of several, the first listed.

    The first `num_known` characters hold none. A search begins where a match can reach beyond
    them, so its time does not grow with the window.
    """
    known = num_known - MAX_BYTES_PER_CHARACTER  # new tokens may change the last character
    places = [(text.find(string, max(0, known - len(string))), string) for string in stop]
    return min((p for p in places if p[0] >= 0), key=lambda p: p[0], default=(-1, None))[1]
