"""Checks of the options that end an output: stop strings and stop tokens.

Each function returns the checked values, or raises a `RequestError` that names the option.
"""

from __future__ import annotations

from typing import Any

from jdllm import errors, value_checks

# SGLang's number. What is longer than an output never matches.
MAX_STRINGS = 32
MAX_CHARACTERS = 2048
MAX_TOKEN_IDS = 1024


def strings(value: Any) -> tuple[str, ...]:
    """Returns the stop strings; a single one may come without a list."""
    found = (value,) if isinstance(value, str) else _listed(value, "stop")
    if len(found) > MAX_STRINGS:
        raise errors.RequestError(
            f"at most {MAX_STRINGS} stop strings, got {len(found)}", param="stop"
        )
    if any(not isinstance(one, str) or not one for one in found):
        raise errors.RequestError("stop strings must be non-empty strings", param="stop")
    for one in found:
        value_checks.check_unicode(one, "stop")
    longest = max(map(len, found), default=0)
    if longest > MAX_CHARACTERS:
        raise errors.RequestError(
            f"a stop string has at most {MAX_CHARACTERS} characters, got {longest}", param="stop"
        )
    return found


def token_ids(value: Any) -> tuple[int, ...]:
    """Returns the ids of the stop tokens."""
    found = _listed(value, "stop_token_ids")
    if len(found) > MAX_TOKEN_IDS:
        raise errors.RequestError(
            f"at most {MAX_TOKEN_IDS} stop_token_ids, got {len(found)}", param="stop_token_ids"
        )
    return tuple(value_checks.check_integer(one, "stop_token_ids", low=0) for one in found)


def _listed(value: Any, param: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise errors.RequestError(f"{param} must be a list, got {errors.quote(value)}", param=param)
    return tuple(value)
