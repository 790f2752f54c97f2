"""Ascending compiled sizes: a launch uses the smallest size that is large enough."""

from __future__ import annotations

import bisect

from jdllm import errors

# On a GPU a launch of fewer tokens takes hardly less time, because it still reads all weights.
FEW_TOKENS = 512


def powers_of_two(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def halvings(budget: int, unit: int) -> tuple[int, ...]:
    """Returns ascending numbers of tokens: the budget in whole units, halved repeatedly.

    They go down to `FEW_TOKENS`; a budget too small to halve also gets its quarter.
    """
    counts = [max(1, budget // unit)]
    while counts[-1] > 1 and counts[-1] * unit >= 2 * FEW_TOKENS:
        counts.append(counts[-1] // 2)
    if len(counts) == 1:
        counts.append(max(1, counts[0] // 4))
    return tuple(sorted({count * unit for count in counts}))


def in_units(count: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


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
