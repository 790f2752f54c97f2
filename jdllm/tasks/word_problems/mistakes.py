"""Spoils a question as people do who type in haste; numbers and words of numbers stay."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from jdllm.tasks import words
from jdllm.tasks.word_problems import number_words

# A slip in one of these words could change what is asked.
_EXACT = number_words.WORDS | frozenset(
    words.listed(
        "more less fewer than each every half twice double triple times dozen left share split"
    )
)
_WORD = re.compile(r"\b[A-Za-z]{4,}\b")
_DOLLARS = re.compile(r"\$(\d+)\b(?![.,]\d)")
_DOLLAR_WORDS = re.compile(r"\b(\d+) dollars\b")


def make(text: str, rng: random.Random) -> str:
    """Returns the text with one to three mistakes or odd habits."""
    for habit in rng.choices(_HABITS, weights=_WEIGHTS, k=rng.choice((1, 1, 2, 3))):
        text = habit(text, rng)
    return text


def _slip(text: str, rng: random.Random) -> str:
    """Swaps, drops or doubles a letter of one word."""
    found = [match for match in _WORD.finditer(text) if match[0].lower() not in _EXACT]
    if not found:
        return text
    match = rng.choice(found)
    i = rng.randint(match.start() + 1, match.end() - 2)
    draw = rng.random()
    if draw < 0.4:
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    if draw < 0.8:
        return text[:i] + text[i + 1 :]
    return text[: i + 1] + text[i:]


def _lower(text: str, _rng: random.Random) -> str:
    return text.lower()


def _upper(text: str, rng: random.Random) -> str:
    return text.upper() if rng.random() < 0.3 else text[:1].lower() + text[1:]


def _no_end(text: str, _rng: random.Random) -> str:
    return text.rstrip("?.!")


def _ends(text: str, rng: random.Random) -> str:
    return text.rstrip("?") + rng.choice(("??", " ?", "?!", ".", "...", "?")) if text else text


def _no_commas(text: str, _rng: random.Random) -> str:
    return text.replace(", ", " ")


def _lines(text: str, rng: random.Random) -> str:
    return text.replace(". ", rng.choice((".\n", ".\n\n", ".  ", " . ", ".", "; ", " - ")))


def _dollars(text: str, rng: random.Random) -> str:
    if "$" in text:
        return _DOLLARS.sub(rng.choice((r"\1 dollars", r"\1$", r"$ \1", r"\1 bucks", r"€\1")), text)
    return _DOLLAR_WORDS.sub(r"$\1", text)


def _apostrophes(text: str, rng: random.Random) -> str:
    return text.replace("'", rng.choice(("\u2019", "", "`")))


def _ampersand(text: str, rng: random.Random) -> str:
    return text.replace(" and ", rng.choice((" & ", " n ", " + ", " plus ")), 1)


def _space(text: str, rng: random.Random) -> str:
    return text.replace(" ", "  ", rng.randint(1, 3)) if rng.random() < 0.5 else f" {text} "


_WEIGHTED: tuple[tuple[float, Callable[[str, random.Random], str]], ...] = (
    (0.35, _slip),
    (0.12, _lower),
    (0.04, _upper),
    (0.12, _no_end),
    (0.08, _ends),
    (0.08, _no_commas),
    (0.08, _lines),
    (0.15, _dollars),
    (0.06, _apostrophes),
    (0.04, _ampersand),
    (0.03, _space),
)
_WEIGHTS, _HABITS = zip(*_WEIGHTED, strict=True)
