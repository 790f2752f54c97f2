"""A story under construction: people, things, sentences and worked steps."""

from __future__ import annotations

import random
import re
import string

from jdllm.tasks import splits, words

Step = tuple[str, int, int, int]  # op, a, b, result

MAX_VALUE = 250
MAX_QUOTIENT = 30


class Impossible(Exception):
    """Says that the drawn numbers do not fit the story; the caller draws another story."""


class Story:
    """The story under construction: its people and things, sentences, steps and answers."""

    def __init__(self, rng: random.Random, split: splits.Split):
        self.rng = rng
        self.split = split
        self.sentences: list[str] = []
        self.steps: list[Step] = []
        self.answers: list[str] = []
        self.phrasings: list[str] = []
        self.names: list[str] = []
        name, is_he = self.new_name()
        pronoun, him, his = ("he", "him", "his") if is_he else ("she", "her", "her")
        plural, single = rng.choice(words.CONTAINERS)
        sharers, sharer = rng.choice(words.SHARERS)
        self.slots: dict[str, object] = {
            "A": name, "B": self.new_name()[0], "P": pronoun.capitalize(), "p": pronoun,
            "m": him, "h": his, "H": his.capitalize(), "o": self.new_things(),
            "C": plural, "c": single, "S": sharers, "s": sharer,
        }  # fmt: skip

    def is_allowed(self) -> bool:
        """Returns whether the split allows the numbers and phrasings of the finished story."""
        new_pair = any(splits.is_held_out_pair(*step[:3]) for step in self.steps)
        if self.split == "train":
            return not new_pair
        return new_pair and any(map(splits.is_held_out_phrasing, self.phrasings))

    def new_name(self) -> tuple[str, bool]:
        """Draws a name that the story does not have yet; returns it and whether it is a `he`."""
        rng = self.rng
        while True:
            is_he = rng.random() < 0.5
            if self.split == "test":
                name = rng.choice(words.TEST_HE_NAMES if is_he else words.TEST_SHE_NAMES)
            elif rng.random() < 0.4:
                name = _invented(rng).capitalize()
            else:
                name = rng.choice(words.HE_NAMES if is_he else words.SHE_NAMES)
            if name not in self.names and (self.split == "test" or name not in words.TEST_NAMES):
                self.names.append(name)
                return name, is_he

    def new_things(self) -> str:
        """Draws a plural noun: mostly real, sometimes coloured, sometimes invented."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.1:
            return _invented(rng).rstrip("s") + "s"
        if draw < 0.25:
            return f"{rng.choice(words.COLORS)} {rng.choice(words.THINGS)}"
        return rng.choice(words.THINGS)

    def partner(self, table: tuple[str, ...]) -> str:
        """Draws the person who gives or takes things: a relative or a third person, never {B}."""
        return self.rng.choice(table).format(**self.slots, D=self.new_name()[0])

    def phrase(self, family: str, **numbers: object) -> str:
        """Returns one sentence of a family with the story's people and things."""
        frame, verb, key = self.rng.choice(splits.phrasings(family, self.split))
        self.phrasings.append(key)
        return frame.format(**{**self.slots, "v": verb, **numbers})

    def say(self, family: str, **numbers: object) -> None:
        self.sentences.append(self.phrase(family, **numbers))

    def ask(self, family: str) -> str:
        stem, ending, key = self.rng.choice(splits.phrasings(family, self.split))
        self.phrasings.append(key)
        return stem.format(**self.slots) + (ending if ending == "?" else f" {ending}")

    def step(self, op: str, a: int, b: int, sentence: str, unit: str = "") -> int:
        """Adds a worked step; in `sentence`, {x} stands for the expression and the result."""
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
        if not 0 < result <= MAX_VALUE or (op == "/" and a % b):
            raise Impossible
        self.steps.append((op, a, b, result))
        worked = f"{a} {op} {b} = {unit}<<{a}{op}{b}={result}>>{result}"
        self.answers.append(sentence.format(**{**self.slots, "x": worked}))
        return result

    def amount(self) -> int:
        """Draws a quantity: small ones often, up to 150."""
        draw = self.rng.random()
        low, high = (2, 20) if draw < 0.4 else (10, 100) if draw < 0.9 else (50, 150)
        return self.rng.randint(low, high)

    def below(self, value: int) -> int:
        """Draws a quantity smaller than `value`."""
        if value < 3:
            raise Impossible
        return self.rng.randint(2, value - 1)

    def factors(self) -> tuple[int, int]:
        """Draws the two numbers of a multiplication."""
        a, b = self.rng.randint(2, 20), self.rng.randint(2, 12)
        return (a, b) if self.rng.random() < 0.5 else (b, a)

    def divisor(self, value: int) -> int:
        """Draws an exact divisor of `value` for a division."""
        fit = [d for d in range(2, 13) if value % d == 0 and 2 <= value // d <= MAX_QUOTIENT]
        if not fit:
            raise Impossible
        return self.rng.choice(fit)


def _invented(rng: random.Random) -> str:
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
