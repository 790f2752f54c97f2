"""Checks of single values of a request: each raises a `RequestError` that names the parameter.

A bool is no number here, although Python counts it as one, and a whole number may come as a float:
many languages write 8 as 8.0. Callers never pass None. A message quotes a part of a line of a value
(`errors.quote`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jdllm import errors

LARGEST_INTEGER = 2**31 - 1  # of an int32 array on the device


def check_number(value: Any, param: str, *, low: float, high: float) -> float:
    """Returns `value`, or raises unless it is a finite number in [low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer is finite, but may be too long for the float that `isfinite` would make of it.
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise errors.RequestError(
            f"{param} must be a finite number, got {errors.quote(value)}", param=param
        )
    if not low <= value <= high:
        raise errors.RequestError(
            f"{param}={errors.quote(value)} is outside [{low:g}, {high:g}]", param=param
        )
    return value


def whole(value: Any) -> Any:
    """Returns the integer that a float without a fraction is; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_integer(value: Any, param: str, *, low: int, high: int = LARGEST_INTEGER) -> int:
    """Returns `value` as an integer from `low` to `high`, or raises."""
    value = whole(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.RequestError(
            f"{param} must be an integer, got {errors.quote(value)}", param=param
        )
    if not low <= value <= high:
        raise errors.RequestError(
            f"{param}={errors.quote(value)} must be between {low} and {high}", param=param
        )
    return value


def check_unicode(text: str, param: str) -> None:
    """Raises for a text with a lone surrogate: half of a character, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = error.start
        raise errors.RequestError(
            f"{param} holds a lone surrogate, {errors.quote(text[place])}, at character {place} of "
            f"{errors.quote(text)}; half of a character is no text",
            param=param,
        ) from None


def check_flag(value: Any, param: str) -> None:
    """Raises unless `value` is true or false."""
    if not isinstance(value, bool):
        raise errors.RequestError(
            f"{param} must be true or false, got {errors.quote(value)}", param=param
        )


def check_word(value: Any, param: str, *, words: Sequence[str]) -> None:
    """Raises unless `value` is one of `words`; the message names the nearest one."""
    if not isinstance(value, str) or value not in words:
        raise errors.RequestError(
            f"unknown {param}={errors.quote(value)}{errors.nearest(value, words)}", param=param
        )
