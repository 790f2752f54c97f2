"""What the small files of a tokenizer must hold, said by file and key before a library reads them.

transformers answers a wrong value with an error of its own insides, or takes it without a word.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from jdllm import errors
from jdllm.checkpoint import source

CONFIG_NAME, MAP_NAME = "tokenizer_config.json", "special_tokens_map.json"
ADDED_NAME, TEMPLATE_NAME = "added_tokens.json", "chat_template.jinja"
DECODER_KEY, MORE_KEY = "added_tokens_decoder", "additional_special_tokens"
TEMPLATE_KEY = "chat_template"
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


def check(directory: pathlib.Path) -> None:
    """Raises a ConfigError if a special or an added token, or a chat template, is none.

    Missing files are no error.
    """
    for place, token in _special_tokens(directory):
        _text_of(place, token)
    file = directory / CONFIG_NAME
    content = source.read_optional_json(file)
    _check_template(f"{file}: {TEMPLATE_KEY}", content.get(TEMPLATE_KEY))
    decoder = content.get(DECODER_KEY, {})
    if not isinstance(decoder, dict):
        raise errors.ConfigError(f"{file}: {DECODER_KEY}={errors.quote(decoder)} is no object")
    for token_id, token in decoder.items():
        place = f"{file}: {DECODER_KEY}.{errors.quote(token_id)}"
        if not token_id.isdecimal():
            raise errors.ConfigError(f"{place}: its key must be a token's id")
        _text_of(place, token)
    file = directory / ADDED_NAME
    for text, token_id in source.read_optional_json(file).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise errors.ConfigError(
                f"{file}: {errors.quote(text)}={errors.quote(token_id)} must be a token's id"
            )


def special_tokens(directory: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the special tokens of checked files: where each is named, and its text."""
    return [(place, _text_of(place, token)) for place, token in _special_tokens(directory)]


def _special_tokens(directory: pathlib.Path) -> Iterator[tuple[str, Any]]:
    for name in (CONFIG_NAME, MAP_NAME):
        content = source.read_optional_json(directory / name)
        for key in SPECIAL_TOKENS:
            if content.get(key) is not None:
                yield f"{directory / name}: {key}", content[key]
        more = content.get(MORE_KEY)
        if more is not None and not isinstance(more, list):
            place = f"{directory / name}: {MORE_KEY}"
            raise errors.ConfigError(f"{place}={errors.quote(more)} is no list")
        for number, token in enumerate(more or ()):
            yield f"{directory / name}: {MORE_KEY}[{number}]", token


def _check_template(place: str, template: Any) -> None:
    """A template is a text; several are a list of objects with `name` and `template`."""
    if template is None or isinstance(template, str):
        return
    named = template if isinstance(template, list) else [None]
    for one in named:
        keys = ("name", "template")
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in keys):
            raise errors.ConfigError(
                f"{place}={errors.quote(template)} must be a text, or a list of objects with the "
                "texts name and template"
            )


def text_of(token: Any) -> Any:
    """Returns the text of a token: it is the text, or an object that holds it as `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _text_of(place: str, token: Any) -> str:
    """Returns the text of a token, which `check` may not have seen yet."""
    text = text_of(token)
    if not isinstance(text, str):
        raise errors.ConfigError(
            f"{place}={errors.quote(token)} must be a text, or an object with a text as content"
        )
    return text
