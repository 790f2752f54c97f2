"""Ids of prompts for encoders that read a fixed number of them: CLIP, and T5 as FLUX.1 runs it.

A prompt's ids are followed by an end token and then by pads, which count: they are part of what the
encoder reads. A prompt that is too long loses ids before the end token, never that token.
"""

from __future__ import annotations

import pathlib

from jdllm import errors, value_checks
from jdllm.checkpoint import tokenizer_checks
from jdllm.pipelines import prompts, tokenizer_files

_BYTES = 256


class PaddedTokenizer:
    """The tokenizer folder of an encoder of padded prompts.

    `pad_token` is that of the tokenizer's class, unless tokenizer_config.json names another.
    Raises a ConfigError that names the file, also if an id is outside the encoder's vocabulary.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        vocab_size: int,
        pad_token: str,
        read_parts: tokenizer_files.ReadParts | None = None,
    ):
        self._tokenizer = tokenizer_files.load(
            directory, vocab_size=vocab_size, read_parts=read_parts
        )
        self._num_added = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if not self._num_added:
            raise errors.ConfigError(
                f"{directory}: the tokenizer adds no end token (post_processor), which the text "
                "encoder needs"
            )
        given = tokenizer_files.read_config(directory).get("pad_token") or pad_token
        pad_id = self._tokenizer.token_to_id(tokenizer_checks.text_of(given))
        if pad_id is None:
            raise errors.ConfigError(
                f"{directory / tokenizer_checks.CONFIG_NAME}: pad_token={errors.quote(given)} is "
                "no token of the tokenizer"
            )
        self._pad_id = pad_id

    def encode(self, prompt: str, *, max_sequence_length: int) -> prompts.PromptIds:
        """Returns exactly `max_sequence_length` ids; what the tokenizer adds is not cut."""
        value_checks.check_integer(max_sequence_length, "max_sequence_length", low=self._num_added)
        encoding = self._tokenizer.encode(prompts.checked(prompt), add_special_tokens=False)
        num_own = len(encoding.ids)
        encoding.truncate(max_sequence_length - self._num_added)
        num_cut = num_own - len(encoding.ids)
        ids = self._tokenizer.post_process(encoding).ids
        return _padded(ids, self._pad_id, max_sequence_length, num_cut)


class PaddedByteTokenizer:
    """A stand-in for pipelines without tokenizer files: UTF-8, an end token, pads.

    The id of a byte is the byte plus `offset`. Negative `end_id` and `pad_id` count from the end of
    the vocabulary.
    """

    def __init__(self, *, vocab_size: int, offset: int, end_id: int, pad_id: int):
        if not 0 <= offset <= vocab_size - _BYTES - 1:
            raise errors.ConfigError(
                f"vocab_size={vocab_size} of the text encoder is too small for the stand-in "
                f"tokenizer, whose ids are {offset} to {offset + _BYTES - 1} and that of an end"
            )
        self._offset = offset
        self._end_id, self._pad_id = end_id % vocab_size, pad_id % vocab_size

    def encode(self, prompt: str, *, max_sequence_length: int) -> prompts.PromptIds:
        """Returns exactly `max_sequence_length` ids, the end token among them."""
        value_checks.check_integer(max_sequence_length, "max_sequence_length", low=1)
        own = [byte + self._offset for byte in prompts.checked(prompt).encode()]
        kept = own[: max_sequence_length - 1]
        num_cut = len(own) - len(kept)
        return _padded([*kept, self._end_id], self._pad_id, max_sequence_length, num_cut)


class JoinedTokenizer:
    """Two tokenizers for two encoders: the ids of the first, `first_length` of them, come first.

    What is told as cut is what the second one loses, which has more room: it decides whether
    anything of a prompt is lost.
    """

    def __init__(
        self,
        first: prompts.PromptTokenizer,
        second: prompts.PromptTokenizer,
        *,
        first_length: int,
    ):
        self._first, self._second, self._first_length = first, second, first_length

    def encode(self, prompt: str, *, max_sequence_length: int) -> prompts.PromptIds:
        """Returns `first_length` ids, then up to `max_sequence_length` others."""
        first = self._first.encode(prompt, max_sequence_length=self._first_length)
        second = self._second.encode(prompt, max_sequence_length=max_sequence_length)
        return prompts.PromptIds(ids=first.ids + second.ids, num_cut=second.num_cut)


def _padded(ids: list[int], pad_id: int, length: int, num_cut: int) -> prompts.PromptIds:
    return prompts.PromptIds(ids=(*ids, *[pad_id] * (length - len(ids))), num_cut=num_cut)
