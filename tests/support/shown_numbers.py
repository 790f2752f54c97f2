"""The numbers that a question shows, read apart from the code that writes it."""

from __future__ import annotations

import re

_ONES = re.findall(r"\w+", "one two three four five six seven eight nine")
_TEENS = re.findall(
    r"\w+",
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = {word: value for value, word in enumerate((*_ONES, *_TEENS), start=1)}
_SMALL |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}
_SMALL |= {f"{ten}-{one}": _SMALL[ten] + _SMALL[one] for ten in _TENS for one in _ONES}
_WORD = "|".join(sorted(_SMALL, key=len, reverse=True))
_NUMBER = re.compile(rf"\b(?:({_WORD}) (hundred|thousand)(?: and)?\b ?)?({_WORD})?\b")


def of(text: str) -> set[int]:
    """Returns the numbers in digits and in words."""
    found = {int(digits) for digits in re.findall(r"\d+", text)}
    for count, size, rest in _NUMBER.findall(text.lower()):
        if count or rest:
            head = _SMALL[count] * (100 if size == "hundred" else 1000) if count else 0
            found.add(head + _SMALL.get(rest, 0))
        if size == "thousand":  # "two thousand litres" may show a 2
            found.add(_SMALL[count])
    return found
