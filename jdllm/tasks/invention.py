"""Draws of names, things and made-up words for stories.

Training sees many invented words, so that a model learns to copy a name or a thing that it has
never seen.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Container

from jdllm.tasks import words
from jdllm.tasks.splits import Split


def new_name(rng: random.Random, split: Split, taken: Container[str]) -> tuple[str, bool]:
    """Draws a name that is not `taken`; returns it and whether it is a `he`."""
    while True:
        is_he = rng.random() < 0.5
        if split == "test":
            name = rng.choice(words.TEST_HE_NAMES if is_he else words.TEST_SHE_NAMES)
        elif rng.random() < 0.4:
            name = invented(rng).capitalize()
        else:
            name = rng.choice(words.HE_NAMES if is_he else words.SHE_NAMES)
        if name not in taken and (split == "test" or name not in words.TEST_NAMES):
            return name, is_he


def new_things(rng: random.Random) -> str:
    """Draws a plural noun: mostly real, sometimes coloured, sometimes invented."""
    draw = rng.random()
    if draw < 0.1:
        return invented(rng).rstrip("s") + "s"
    if draw < 0.25:
        return f"{rng.choice(words.COLORS)} {rng.choice(words.THINGS)}"
    return rng.choice(words.THINGS)


def invented(rng: random.Random) -> str:
    """Returns a made-up word.

    It consists of syllables, of parts of two real words, or of random letters. Together these
    words show every token that an unseen word may contain, so the model has learnt to copy it.
    """
    draw = rng.random()
    if draw < 0.1:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7)))
    if draw < 0.4:
        head, tail = rng.choice(_REAL), rng.choice(_REAL)
        return head[: rng.randint(1, 5)] + tail[-rng.randint(2, 6) :]
    parts: list[str] = []
    if draw < 0.55:
        parts.append(rng.choice("aeiou") + rng.choice("bdfglmnprstvz"))
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        parts += rng.choice(words.ONSETS), rng.choice(words.VOWELS), rng.choice(words.CODAS)
    return "".join(parts)


def _real_words() -> tuple[str, ...]:
    tables = (*words.FAMILIES.values(), *words.QUESTIONS.values())
    texts = [text for frames, verbs in tables for text in (*frames, *verbs)]
    texts += [*words.HE_NAMES, *words.SHE_NAMES, *words.THINGS, *words.COLORS, *words.PLACES]
    texts += [text for pair in (*words.CONTAINERS, *words.SHARERS) for text in pair]
    return tuple(sorted({w for text in texts for w in re.findall("[a-z]{2,}", text.lower())}))


_REAL = _real_words()
