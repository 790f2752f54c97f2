"""Checks of the options that edit logits with lists: biases, allowed tokens, bad words.

Each function returns the checked value in one hashable form, or raises a `RequestError`. The bounds
keep what a row carries to the device small. Whether an id is in the vocabulary, and which tokens a
word has, is known only to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors, value_checks

MAX_LOGIT_BIAS, MOST_BIAS = 300, 100.0  # entries; largest absolute value (OpenAI's)
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 256
MAX_ALLOWED_IDS = 1 << 14

Biases = tuple[tuple[int, float], ...]


def biases(value: Any) -> Biases:
    """Returns (token id, bias) in the order of ids; the keys of JSON objects are digits."""
    name = "logit_bias"
    if value is None:
        return ()
    # A tuple of pairs is what this function has returned before.
    is_made = isinstance(value, tuple) and all(isinstance(pair, tuple) for pair in value)
    if not is_made and not isinstance(value, Mapping):
        raise errors.RequestError(
            f"{name} must be an object of token ids, got {errors.quote(value)}", param=name
        )
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if len(pairs) > MAX_LOGIT_BIAS:
        raise errors.RequestError(
            f"{name} has {len(pairs)} entries, at most {MAX_LOGIT_BIAS}", param=name
        )
    found: dict[int, float] = {}
    for key, bias in pairs:
        token_id: Any = int(key) if isinstance(key, str) and _is_short_number(key) else key
        token_id = value_checks.check_integer(token_id, name, low=0)
        value_checks.check_number(bias, name, low=-MOST_BIAS, high=MOST_BIAS)
        found[token_id] = float(bias)
    return tuple(sorted(found.items()))


def _is_short_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def allowed_ids(value: Any) -> tuple[int, ...]:
    name = "allowed_token_ids"
    ids = _items(value, name)
    if not 1 <= len(ids) <= MAX_ALLOWED_IDS:
        raise errors.RequestError(
            f"{name} has {len(ids)} ids; from 1 to {MAX_ALLOWED_IDS} are possible", param=name
        )
    return tuple(sorted({value_checks.check_integer(one, name, low=0) for one in ids}))


def bad_words(value: Any) -> tuple[str, ...]:
    name = "bad_words"
    words = () if value is None else _items(value, name)
    if len(words) > MAX_BAD_WORDS:
        raise errors.RequestError(
            f"{name} has {len(words)} entries, at most {MAX_BAD_WORDS}", param=name
        )
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise errors.RequestError(
                f"{name} must be texts of 1 to {MAX_BAD_WORD_CHARACTERS} characters, got "
                f"{errors.quote(word)}",
                param=name,
            )
        value_checks.check_unicode(word, name)
    return words


def _items(value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise errors.RequestError(f"{name} must be a list, got {errors.quote(value)}", param=name)
    return tuple(value)
