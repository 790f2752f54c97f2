"""Ascending compiled sizes: a launch uses the smallest size that is large enough."""

from __future__ import annotations

import bisect

from jdllm import errors


def check_ascending(name: str, sizes: tuple[int, ...]) -> None:
    """Raises a ConfigError unless `sizes` is not empty, positive and ascending."""
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise errors.ConfigError(f"{name}={sizes} must be positive and ascending")


def smallest(sizes: tuple[int, ...], wanted: int, name: str) -> int:
    """Returns the smallest of `sizes` that is at least `wanted`; raises a ValueError if none is."""
    index = bisect.bisect_left(sizes, wanted)
    if index == len(sizes):
        raise ValueError(f"{wanted} {name} exceed the largest bucket of {sizes[-1]}")
    return sizes[index]
