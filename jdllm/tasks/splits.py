"""Which numbers, phrasings and problems training never shows, decided by a stable hash."""

from __future__ import annotations

import functools
import zlib
from typing import Literal

from jdllm.tasks import words

Split = Literal["train", "test"]

# Chosen so that the plainest sentences ("He buys 5 more apples.") stay in training.
PHRASING_SALT = "21/"


def is_held_out_pair(op: str, a: int, b: int) -> bool:
    """Returns whether training never shows the step `a op b`.

    For + and -, that is one ordered pair in ten. For * and /, it is one of the two orders of one
    fact in ten (for example 7, 8, 56), so the model can still know the fact from the other order.
    This does not work for a division whose mirror no story draws (no story divides by more than
    25, unless a result does); there the model must generalise.
    """
    if op in "+-":
        return _hash(f"{op}{a},{b}") % 10 == 0
    one, other = (a, b) if op == "*" else (a // b, b)
    key = _hash(f"{op}{min(one, other)},{max(one, other)}")
    return key % 10 == 0 and one != other and (one < other) == (key // 10 % 2 == 0)


def is_held_out_problem(key: str) -> bool:
    """Returns whether training never shows this written problem; about one in 20 is so."""
    return _hash("problem/" + key) % 20 == 0


@functools.cache
def is_held_out_phrasing(phrasing: str) -> bool:
    """Returns whether training never shows this `family|frame|verb`; about one in eight is so."""
    return _hash(PHRASING_SALT + phrasing) % 8 == 0


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) >> 3


@functools.cache
def phrasings(family: str, split: Split) -> tuple[tuple[str, str, str], ...]:
    """Returns the (frame, verb, key) triples of a family that a split may use."""
    tables = words.FAMILIES if family in words.FAMILIES else words.QUESTIONS
    frames, verbs = tables[family]
    rows = [(frame, verb, f"{family}|{frame}|{verb}") for frame in frames for verb in verbs]
    return tuple(row for row in rows if split == "test" or not is_held_out_phrasing(row[2]))
