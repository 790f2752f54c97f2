"""Infilling: a suffix that follows the output, and tokens that are given inside it.

A model with full attention sees the prompt, the suffix and the given tokens while it writes the
positions between them. A block-causal model cannot see what comes later, so its scheduler
refuses both. This module brings what callers pass into one form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jdllm import errors, value_checks
from jdllm.engine.tokenizer import Tokenizer

# A suffix is text or token ids. `Given` maps an offset from the prompt's end to a token id, or
# to the text of one token.
Suffix = str | Sequence[int] | Int[np.ndarray, " T"]
Given = Mapping[int, int | str]
# One value for all prompts, or one for each.
Suffixes = Suffix | Sequence[Suffix | None] | None
Givens = Given | Sequence[Given | None] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """The fixed parts of one prompt's output; `given` maps offsets to token ids."""

    suffix_ids: Sequence[int] = ()
    given: Mapping[int, int] = dataclasses.field(default_factory=dict)


def infills(
    suffix: Suffixes,
    given: Givens,
    count: int,
    tokenizer: Tokenizer | None,
) -> list[Infill]:
    """Returns the fixed parts of the output of each of `count` prompts."""
    suffixes = _per_prompt(
        suffix, count, "suffix", lambda value: isinstance(value, str) or _is_ids(value)
    )
    givens = _per_prompt(given, count, "given", lambda value: isinstance(value, Mapping))
    return [
        Infill(suffix_ids=_suffix_ids(one, tokenizer), given=_given_ids(places, tokenizer))
        for one, places in zip(suffixes, givens, strict=True)
    ]


def _per_prompt(value: Any, count: int, name: str, is_one: Callable[[Any], bool]) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None or is_one(value) or not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise errors.RequestError(f"{len(value)} entries of {name} for {count} prompts", param=name)
    return list(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_integer(one) for one in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _suffix_ids(suffix: Any, tokenizer: Tokenizer | None) -> list[int]:
    if suffix is None or isinstance(suffix, str):
        return _encode(suffix, "suffix", tokenizer) if suffix else []
    ids = suffix.tolist() if isinstance(suffix, np.ndarray) else suffix
    if not _is_ids(ids):
        raise errors.RequestError(
            f"suffix must be text or a list of token ids, or a list with one of these or None "
            f"for each prompt, got {errors.quote(suffix)}",
            param="suffix",
        )
    return [int(one) for one in ids]


def _given_ids(given: Any, tokenizer: Tokenizer | None) -> dict[int, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(_is_integer(offset) for offset in given):
        raise errors.RequestError(
            f"given must map offsets from the prompt's end to token ids or to texts of one token, "
            "or be a list with one such mapping or None for each prompt, got "
            f"{errors.quote(given)}",
            param="given",
        )
    return {int(offset): _token_id(token, tokenizer) for offset, token in given.items()}


def _token_id(token: Any, tokenizer: Tokenizer | None) -> int:
    if not isinstance(token, str):
        return token  # the engine checks ids
    ids = _encode(token, "given", tokenizer)
    if len(ids) != 1:
        raise errors.RequestError(
            f"given holds {errors.quote(token)}, which is {len(ids)} tokens, not one; give each "
            "its offset",
            param="given",
        )
    return ids[0]


def _encode(text: str, name: str, tokenizer: Tokenizer | None) -> list[int]:
    """Returns the ids of text inside a sequence; no special tokens are put around it."""
    if tokenizer is None:
        raise errors.RequestError(
            f"{name} as text needs a tokenizer, which this engine runs without; give token ids",
            param=name,
        )
    value_checks.check_unicode(text, name)
    return tokenizer.encode(text, add_special_tokens=False)
