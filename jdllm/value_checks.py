"""Checks of single values of a request: each raises a `RequestError` that names the parameter.

A bool is no number here, although Python counts it as one. Callers never pass None. A message
quotes a part of a line of a value (`errors.quote`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jdllm import errors

LARGEST_INTEGER = 2**31 - 1  # of an int32 array on the device


def check_number(
    value: Any, param: str, *, low: float, high: float, open_low: bool = False
) -> None:
    """Raises unless `value` is a finite number in [low, high], or in (low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer is finite, but may be too long for the float that `isfinite` would make of it.
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise errors.RequestError(
            f"{param} must be a finite number, got {errors.quote(value)}", param=param
        )
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise errors.RequestError(
            f"{param}={errors.quote(value)} is outside {bracket}{low:g}, {high:g}]", param=param
        )


def check_integer(value: Any, param: str, *, low: int, high: int = LARGEST_INTEGER) -> None:
    """Raises unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.RequestError(
            f"{param} must be an integer, got {errors.quote(value)}", param=param
        )
    if not low <= value <= high:
        raise errors.RequestError(
            f"{param}={errors.quote(value)} must be between {low} and {high}", param=param
        )


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
