"""Turns text into ids and back: a thin layer over the checkpoint's own HF tokenizer.

No remote code is ever run. If a checkpoint brings a tokenizer class of its own, a class of
transformers that makes the same ids from the same files replaces it (`STAND_INS`); without
one, the checkpoint is refused. The text that the chat template makes is tokenised without further
special tokens.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from jdllm import errors, value_checks
from jdllm.checkpoint import tokenizer_checks
from jdllm.checkpoint.quiet_transformers import tokenization_auto, transformers
from jdllm.engine import chat_guard
from jdllm.options.config import EngineConfig
from jdllm.templates import chat, conversations

logger = logging.getLogger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Dream's class is Qwen2's byte-level BPE; its own special tokens are data in its files.
STAND_INS = {"DreamTokenizer": transformers.Qwen2Tokenizer}
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (*VOCABULARY_FILES, tokenizer_checks.CONFIG_NAME)


class Tokenizer:
    """Encodes prompts, applies the chat template, decodes outputs."""

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        chat_template: str | None = None,
        revision: str | None = None,
        download_dir: str | os.PathLike[str] | None = None,
        escape_special_tokens: bool = True,
        mask_token_id: int | None = None,
    ):
        directory = pathlib.Path(path).expanduser()
        hub = {} if directory.is_dir() else {"revision": revision, "cache_dir": download_dir}
        if not hub:
            tokenizer_checks.check(directory)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # RoPE keys in config.json
                # Any: what transformers declares to return is wider than what it returns.
                self._hf: Any = _load(str(path if hub else directory), hub)
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            # AttributeError: RoPE keys in a config.json of a family transformers does not know.
            raise errors.ConfigError(
                f"no usable tokenizer at {path}: {_reason(directory, error)}"
            ) from error
        place = _template_place(directory, chat_template)
        if chat_template is not None:
            self._hf.chat_template = _read_template(chat_template)
        try:
            self._template = _chat_template(self._hf.chat_template, self._hf.special_tokens_map)
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{place}: {error}") from error
        self.path = str(path)
        self._bos_id = self._added_bos_id()
        self._escapes = escape_special_tokens
        self._guard = self._chat_guard(mask_token_id)
        if self._template is not None and self._guard is None and escape_special_tokens:
            logger.warning(
                "special tokens in the messages of users stay special (escape_special_tokens): in "
                "what this chat template writes they cannot be told from the template's own"
            )

    @property
    def hugging_face(self) -> transformers.PreTrainedTokenizerBase:
        """The tokenizer as transformers has it, with the chat template that is used here."""
        return self._hf

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id

    def token_id(self, token: str) -> int | None:
        """Returns the id of one vocabulary entry, None if the vocabulary does not have it."""
        return self._hf.get_vocab().get(token)

    def __len__(self) -> int:
        return len(self._hf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text, in which special tokens are such.

        What begins with the token that marks a beginning gets no second one.
        """
        ids = list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        return self._with_one_bos(ids) if add_special_tokens else ids

    def apply_chat_template(
        self,
        messages: chat.Messages,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        escape_special_tokens: bool | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation, followed by the generation prompt.

        `chat_template_kwargs` are further variables of the template. For `continue_final_message`
        see `ChatTemplate.render`, and for what a template does not know `conversations`. With
        `escape_special_tokens` those in messages that are not the assistant's are plain text; None
        is the tokenizer's own default.
        """
        if self._template is None:
            raise errors.RequestError(
                "this model has no chat template; start the server with --chat-template",
                param="messages",
            )
        guard = self._guard_for(escape_special_tokens)
        turns = conversations.for_template(messages, self._template.abilities)
        render = functools.partial(
            self._template.render,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        text = render(turns, tools=tools)
        value_checks.check_unicode(text, "messages")
        ids = guard and guard.safe_ids(
            text,
            turns,
            render,
            tools=tools,
            variables=chat_template_kwargs,
            continues_final=continue_final_message,
            add_special_tokens=add_special_tokens,
        )
        if ids is None:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return self._with_one_bos(ids) if add_special_tokens else ids

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's own entry of each id, as vLLM's `token_strs`."""
        # An id that has no entry (the vocabulary is padded to a round size) has an empty string.
        return [one or "" for one in self._hf.convert_ids_to_tokens(list(ids))]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 of one token, which may be a part of a character."""
        text = self.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._hf.convert_ids_to_tokens(token_id)
        if piece is None:
            return text.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])  # SentencePiece's form of a byte
        table = _bytes_of_letters()
        if all(letter in table for letter in piece):
            return bytes(table[letter] for letter in piece)
        return text.encode()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; incomplete UTF-8 decodes to replacement characters."""
        return self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _added_bos_id(self) -> int | None:
        """Returns the id that a text gets as its beginning; None if it gets none."""
        bos = self._hf.bos_token_id
        return bos if bos is not None and self._hf.encode("")[:1] == [bos] else None

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Returns the ids of a text without the beginning that was added to its own."""
        return ids[1:] if self._bos_id is not None and ids[:2] == [self._bos_id] * 2 else ids

    def _chat_guard(self, mask_token_id: int | None) -> chat_guard.ChatGuard | None:
        """Returns what escapes special tokens; None if nothing can."""
        if self._template is None or not self._hf.is_fast:
            return None
        backend = self._hf.backend_tokenizer
        special = list(self._hf.all_special_tokens)
        if mask_token_id is not None:  # a tokenizer need not call it special
            special += self.token_strings([mask_token_id])
        guard = chat_guard.ChatGuard(backend, self._template, special)
        return (
            guard if guard.works(functools.partial(self.encode, add_special_tokens=False)) else None
        )

    def _guard_for(self, escapes: bool | None) -> chat_guard.ChatGuard | None:
        """Returns the guard of a request; None if it asks for none."""
        if escapes and self._guard is None:
            raise errors.RequestError(
                "escape_special_tokens=True is not possible with this model's chat template, which "
                "changes the text of messages; leave it out",
                param="escape_special_tokens",
            )
        return self._guard if (self._escapes if escapes is None else escapes) else None


def of_model(
    config: EngineConfig, model_dir: pathlib.Path, *, mask_token_id: int | None = None
) -> Tokenizer | None:
    """Returns the tokenizer of the model in `model_dir`; None if ids go in and come out."""
    if config.skip_tokenizer_init:
        return None
    is_bare = not any((model_dir / name).is_file() for name in TOKENIZER_FILES)
    if config.load_format == "dummy" and config.tokenizer_path is None and is_bare:
        logger.warning("%s holds no tokenizer: token ids in, token ids out", model_dir)
        return None
    return Tokenizer(
        config.tokenizer_path or model_dir,
        chat_template=config.chat_template,
        revision=config.revision,
        download_dir=config.download_dir,
        escape_special_tokens=config.escape_special_tokens,
        mask_token_id=mask_token_id,
    )


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Returns the byte that each letter stands for in a byte-level vocabulary (GPT-2's table).

    Bytes that are printable Latin-1 letters stand for themselves, the others for U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def _load(path: str, hub: Mapping[str, Any]) -> transformers.PreTrainedTokenizerBase:
    """Returns the tokenizer at `path`, a directory or the id of a hub model."""
    declared = tokenization_auto.get_tokenizer_config(path, **hub)
    stand_in = STAND_INS.get(declared.get("tokenizer_class", ""))
    if stand_in is None:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, **hub)
    loaded = stand_in.from_pretrained(path, **hub)
    # The class numbers the added tokens by itself. With the mask at another id, the output would
    # be garbage, and nothing would report it.
    for token_id, token in declared.get("added_tokens_decoder", {}).items():
        got = loaded.convert_tokens_to_ids(token["content"])
        if got != int(token_id):
            raise ValueError(
                f"{stand_in.__name__}, which stands in for {declared['tokenizer_class']}, gives "
                f"{token['content']!r} the id {got}, but tokenizer_config.json says {token_id}"
            )
    return loaded


def _reason(directory: pathlib.Path, error: Exception) -> str:
    """Returns what is wrong in one line, first of all whether files are missing.

    transformers answers a folder without them with advice to install packages, which do not help.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    whole = directory / VOCABULARY_FILES[0]
    if whole.is_file():
        try:
            tokenizers.Tokenizer.from_file(str(whole))
        except Exception as fault:  # the library raises plain Exceptions
            return f"{text} ({whole.name}: {fault})"
    if not directory.is_dir() or any((directory / name).is_file() for name in VOCABULARY_FILES):
        return text
    return (
        f"the folder holds none of {', '.join(VOCABULARY_FILES)}; tokenizer_path names another "
        f"folder ({text})"
    )


def _chat_template(
    source: str | Mapping[str, str] | None, special_tokens: Mapping[str, Any]
) -> chat.ChatTemplate | None:
    """Returns the compiled template; of several, the one that is named `default`."""
    if isinstance(source, Mapping):
        if "default" not in source:
            raise errors.ConfigError(
                f"the tokenizer has chat templates {sorted(source)}, but none is named 'default'; "
                "give one with chat_template"
            )
        source = source["default"]
    if source is None:
        return None
    return chat.ChatTemplate(source, special_tokens={k: str(v) for k, v in special_tokens.items()})


def _template_place(directory: pathlib.Path, option: str | None) -> str:
    """Returns how errors of the chat template name where it stands."""
    if option is not None:
        return "chat_template" if "{" in option else f"chat_template={option!r}"
    file = directory / tokenizer_checks.TEMPLATE_NAME
    return str(file if file.is_file() else directory / tokenizer_checks.CONFIG_NAME)


def _read_template(source: str) -> str:
    """Returns a chat template; `source` is the template itself or the path of a file."""
    if "{" in source:
        return source
    path = pathlib.Path(source)
    if not path.is_file():
        raise errors.ConfigError(f"chat_template={source!r} is neither a file nor a Jinja template")
    return path.read_text()
