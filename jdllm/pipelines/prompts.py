"""From the text of a prompt to the ids that the text encoder reads.

The prompt is the one message of a user, which the chat template of the tokenizer folder writes, or
it stands in a text of the pipeline. Ids past `max_sequence_length` are cut from the end, as the
published pipelines do, so a long prompt loses what the template writes after it. The caller learns
how many, and can say so.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Protocol

from jdllm import errors, value_checks
from jdllm.checkpoint import tokenizer_checks
from jdllm.pipelines import tokenizer_files
from jdllm.templates import chat

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTES = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptIds:
    """The ids of a prompt without padding, and how many more there were before the cut."""

    ids: tuple[int, ...]
    num_cut: int


class PromptTokenizer(Protocol):
    """What encodes the prompts of a pipeline."""

    def encode(self, prompt: str, *, max_sequence_length: int) -> PromptIds:
        """Returns 1 to `max_sequence_length` ids; a RequestError names what cannot be encoded.

        The ids of a prefix (`Pipeline.prefix_tokens`) come on top.
        """
        ...


class ChatTokenizer:
    """The tokenizer folder of a pipeline: `tokenizer.json` and a chat template.

    Raises a ConfigError that names the file, also if an id is outside the encoder's vocabulary.
    """

    def __init__(self, directory: pathlib.Path, *, vocab_size: int):
        self._tokenizer = tokenizer_files.load(
            directory, vocab_size=vocab_size, read_parts=tokenizer_files.qwen2
        )
        self._template = _chat_template(directory)

    def encode(self, prompt: str, *, max_sequence_length: int) -> PromptIds:
        """Returns the ids of the templated prompt."""
        text = self._template.render(
            [{"role": "user", "content": checked(prompt)}],
            variables={"enable_thinking": True},
            add_generation_prompt=True,
        )
        return _cut(self._tokenizer.encode(text).ids, max_sequence_length)


class FramedTokenizer:
    """The tokenizer folder of a pipeline whose own text stands around a prompt: `tokenizer.json`.

    The first `prefix_tokens` ids of the whole text are the prefix. Their number is a constant, even
    if the end of `before` and the beginning of a prompt become one token. Raises as `ChatTokenizer`
    does.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        vocab_size: int,
        before: str,
        after: str,
        prefix_tokens: int,
    ):
        self._tokenizer = tokenizer_files.load(
            directory, vocab_size=vocab_size, read_parts=tokenizer_files.qwen2
        )
        self._before, self._after = before, after
        self._prefix_tokens = prefix_tokens

    def encode(self, prompt: str, *, max_sequence_length: int) -> PromptIds:
        """Returns the ids of the prompt in its frame."""
        text = f"{self._before}{checked(prompt)}{self._after}"
        ids = self._tokenizer.encode(text).ids
        return _cut(ids, max_sequence_length, prefix_tokens=self._prefix_tokens)


class ByteTokenizer:
    """A stand-in for pipelines without tokenizer files: UTF-8 and a line end, no template.

    The id of a byte is the byte plus `offset`. The ids of a prefix are all the same.
    """

    def __init__(self, *, vocab_size: int, offset: int = 0, prefix_tokens: int = 0):
        if offset < 0 or offset + _BYTES > vocab_size:
            raise errors.ConfigError(
                f"vocab_size={vocab_size} of the text encoder is too small for the stand-in "
                f"tokenizer, whose ids are {offset} to {offset + _BYTES - 1}"
            )
        self._offset = offset
        self._prefix = [offset] * prefix_tokens

    def encode(self, prompt: str, *, max_sequence_length: int) -> PromptIds:
        """Returns the ids of the prompt's bytes; the line end gives an empty prompt an id too."""
        encoded = f"{checked(prompt)}\n".encode()
        ids = [*self._prefix, *(byte + self._offset for byte in encoded)]
        return _cut(ids, max_sequence_length, prefix_tokens=len(self._prefix))


def checked(prompt: str) -> str:
    """Returns the prompt, or raises a RequestError for what is no Unicode text."""
    if not isinstance(prompt, str):
        raise errors.RequestError(
            f"prompt must be a string, got {errors.quote(prompt)}", param="prompt"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise errors.RequestError(
            f"prompt is no valid Unicode at character {error.start}", param="prompt"
        ) from error
    return prompt


def _cut(ids: list[int], max_sequence_length: int, *, prefix_tokens: int = 0) -> PromptIds:
    value_checks.check_integer(max_sequence_length, "max_sequence_length", low=1)
    if len(ids) <= prefix_tokens:
        raise errors.RequestError(
            "prompt gives no token, for the pipeline's template adds none; write a text",
            param="prompt",
        )
    kept = ids[: prefix_tokens + max_sequence_length]
    return PromptIds(ids=tuple(kept), num_cut=len(ids) - len(kept))


def _chat_template(directory: pathlib.Path) -> chat.ChatTemplate:
    config = tokenizer_files.read_config(directory)
    try:
        file = directory / tokenizer_checks.TEMPLATE_NAME
        template = file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(
            f"{directory / tokenizer_checks.TEMPLATE_NAME} cannot be read: {error}"
        ) from error
    template = template or config.get("chat_template")
    if not isinstance(template, str) or not template.strip():
        raise errors.ConfigError(
            f"{directory} has no chat template: neither {tokenizer_checks.TEMPLATE_NAME} nor a "
            f"text as chat_template in {tokenizer_checks.CONFIG_NAME}"
        )
    special = {
        name: tokenizer_checks.text_of(token)
        for name in _SPECIAL_TOKENS
        if (token := config.get(name)) is not None
    }
    try:
        return chat.ChatTemplate(template, special_tokens=special)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{directory}: {error}") from error
