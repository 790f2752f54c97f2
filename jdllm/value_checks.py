"""Checks of single values of a request: each raises a `RequestError` that names the parameter.

A bool is no number here, although Python counts it as one. Callers never pass None. A message
quotes at most `QUOTED_CHARACTERS` of a value.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from jdllm import errors

LARGEST_INTEGER = 2**31 - 1  # of an int32 array on the device
QUOTED_CHARACTERS = 80
_LONGEST_INTEGER = 256  # in bits; Python refuses to write very long integers at all


class _Quoting(reprlib.Repr):
    """Short forms of values, also of those inside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = QUOTED_CHARACTERS
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _LONGEST_INTEGER:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)  # pyright: ignore[reportAttributeAccessIssue] # typeshed lacks it


_QUOTING = _Quoting()


def quoted(value: Any) -> str:
    """Returns a value as Python writes it, shortened to `QUOTED_CHARACTERS`."""
    return cut(_QUOTING.repr(value))


def cut(text: str) -> str:
    """Returns the beginning of a text, as long as a message may quote."""
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[: QUOTED_CHARACTERS - 3]}..."


def check_number(
    value: Any, param: str, *, low: float, high: float, open_low: bool = False
) -> None:
    """Raises unless `value` is a finite number in [low, high], or in (low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer is finite, but may be too long for the float that `isfinite` would make of it.
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise errors.RequestError(
            f"{param} must be a finite number, got {quoted(value)}", param=param
        )
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise errors.RequestError(
            f"{param}={quoted(value)} is outside {bracket}{low:g}, {high:g}]", param=param
        )


def check_integer(value: Any, param: str, *, low: int, high: int = LARGEST_INTEGER) -> None:
    """Raises unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.RequestError(f"{param} must be an integer, got {quoted(value)}", param=param)
    if not low <= value <= high:
        raise errors.RequestError(
            f"{param}={quoted(value)} must be between {low} and {high}", param=param
        )


def check_flag(value: Any, param: str) -> None:
    """Raises unless `value` is true or false."""
    if not isinstance(value, bool):
        raise errors.RequestError(
            f"{param} must be true or false, got {quoted(value)}", param=param
        )


def check_word(value: Any, param: str, *, words: Sequence[str]) -> None:
    """Raises unless `value` is one of `words`; the message names the nearest one."""
    if not isinstance(value, str) or value not in words:
        shown = quoted(value)
        raise errors.RequestError(
            f"unknown {param}={shown}{errors.nearest(shown.strip(chr(39)), words)}", param=param
        )
