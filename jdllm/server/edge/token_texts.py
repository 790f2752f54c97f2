"""Which output tokens are text, what text each has, and where in the text of its choice it begins.

A choice's text is not the joined texts of its tokens. Special tokens may be skipped, an end token
or a stop string is cut off, a character may be split over several tokens, and some tokenizers drop
a space at the beginning of a text. `ListedTokens` follows all of this token by token, so that the
tokens that it gives join to the text.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import functools
from typing import TYPE_CHECKING

from jdllm.engine import detokenizer

if TYPE_CHECKING:
    from jdllm.engine import generations, tokenizer
    from jdllm.options import sampling_params

CACHED_TOKENS = 1 << 15


def written(data: bytes) -> str:
    """Returns the text of a token; a part of a character is written like `bytes:\\xe2\\x80`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenTexts:
    """The UTF-8 of single tokens, which may be parts of characters."""

    def __init__(self, tokenizer: tokenizer.Tokenizer):
        self.tokenizer = tokenizer
        # (token id, whether it begins a text, whether special tokens are skipped) -> its bytes
        self.data = functools.lru_cache(CACHED_TOKENS)(self._data)

    def alone(self, token_id: int) -> str:
        """Returns the text of a token without any context, as SGLang shows it."""
        return written(self.data(token_id, True, False))

    def _data(self, token_id: int, is_first: bool, skips: bool) -> bytes:
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=skips)
        text = decode([token_id])
        if detokenizer.REPLACEMENT in text:
            return self.tokenizer.token_bytes(token_id)
        if not is_first:
            text = decode([token_id, token_id])[len(text) :]
        return text.encode()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An output token that has text.

    `place`: number of the token in `output_ids`. `offset`: number of the character that the token
    begins or continues. `before`: bytes of that character in earlier tokens.
    """

    place: int
    token_id: int
    is_first: bool
    offset: int
    before: bytes
    data: bytes

    def within(self, end: int, length: int) -> Listed:
        """Returns the part of a token, which ends at `end`, in a text of `length` characters."""
        if end <= length:
            return self
        text = (self.before + self.data).decode(errors="replace")[: length - self.offset]
        return dataclasses.replace(self, data=text.encode()[len(self.before) :])


class ListedTokens:
    """The tokens of one choice that are text, each at the time when all its text has been sent.

    What is given depends only on ids and text, so the parts of a stream join to the whole answer.
    """

    def __init__(self, texts: TokenTexts, params: sampling_params.SamplingParams):
        self._texts = texts
        self._params = params
        self._num_read = 0
        self._is_first = True
        self._length = 0  # whole characters so far
        self._cut = b""  # the character behind them, which is not whole yet
        self._open: list[Listed] = []  # the tokens with a part of it
        self._closed: collections.deque[tuple[int, Listed]] = collections.deque()  # (end, token)

    def update(self, generation: generations.Generation) -> list[Listed]:
        """Returns the tokens that the text has reached; at its end, the last one may be cut."""
        ids, finish, length = generation.output_ids, generation.finish_reason, len(generation.text)
        is_trimmed = finish is not None and isinstance(finish.get("matched"), int)
        # An end token that is cut off may be a byte, which would go on with a cut character.
        num_text = len(ids) - (is_trimmed and not self._params.no_stop_trim)
        for place in range(self._num_read, num_text):
            self._read(place, ids[place])
        self._num_read = len(ids)
        found: list[Listed] = []
        while self._closed and self._closed[0][0] <= length:
            found.append(self._closed.popleft()[1])
        if finish is not None:
            self._give_up_cut()
            rest = [one.within(end, length) for end, one in self._closed if one.offset < length]
            found += rest
        return found

    def _read(self, place: int, token_id: int) -> None:
        is_first, skips = self._is_first, self._params.skip_special_tokens
        data = self._texts.data(token_id, is_first, skips)
        if is_first:  # a leading space is dropped once, even if it is all that the token has
            self._is_first = not self._texts.data(token_id, False, skips)
        if not data:
            return
        if self._cut and not _continues(self._cut, data):
            self._give_up_cut()
        before, offset = self._cut, self._length
        text, num_whole = codecs.utf_8_decode(before + data, "replace", False)
        if text:
            self._close(offset + 1)
        self._length += len(text)
        self._cut = (before + data)[num_whole:]
        self._open.append(
            Listed(
                place=place,
                token_id=token_id,
                is_first=is_first,
                offset=offset,
                before=before,
                data=data,
            )
        )
        if not self._cut:
            self._close(self._length)

    def _close(self, end: int) -> None:
        """Sets where the open tokens end."""
        self._closed += [(end, one) for one in self._open]
        self._open = []

    def _give_up_cut(self) -> None:
        """Counts what the text has in place of a character that does not become whole."""
        if not self._cut:
            return
        # With tokens of one byte, some tokenizers write one replacement character for each.
        ids = [one.token_id for one in self._open]
        is_bytes = all(len(one.data) == 1 for one in self._open)
        self._length += len(self._texts.tokenizer.decode(ids)) if is_bytes else 1
        self._cut = b""
        self._close(self._length)


def _continues(cut: bytes, data: bytes) -> bool:
    """Says whether `data` may go on with the character that `cut` begins."""
    try:
        codecs.utf_8_decode(cut + data[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True
