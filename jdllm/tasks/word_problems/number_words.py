"""Numbers as words: "three", "forty-two", "two hundred"."""

from __future__ import annotations

import random

from jdllm.tasks import words

_SMALL = words.listed(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen"""
)
_TENS = words.listed("twenty thirty forty fifty sixty seventy eighty ninety")


def spell(number: int) -> str:
    """Returns a number from 0 to 1000 in words."""
    if not 0 <= number <= 1000:
        raise ValueError(f"{number=} must be from 0 to 1000")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = _TENS[number // 10 - 2], number % 10
        return f"{tens}-{_SMALL[ones]}" if ones else tens
    if number == 1000:
        return "one thousand"
    head, rest = f"{_SMALL[number // 100]} hundred", number % 100
    return f"{head} and {spell(rest)}" if rest else head


def sometimes(number: int, rng: random.Random) -> str:
    """Returns a number in words if it is small, seldom if it is large, or else in digits."""
    share = 0.7 if number <= 12 else 0.4 if number <= 20 or number in (30, 40, 50, 100) else 0.06
    return spell(number) if number <= 1000 and rng.random() < share else str(number)


WORDS = frozenset((*_SMALL, *_TENS, "hundred", "thousand"))
