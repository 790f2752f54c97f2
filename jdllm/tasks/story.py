"""A story under construction: people, things, sentences and worked steps."""

from __future__ import annotations

import random

from jdllm.tasks import amounts, invention, splits, words


class Story:
    """The story under construction: its people and things, sentences and steps."""

    def __init__(self, rng: random.Random, split: splits.Split):
        self.rng = rng
        self.split: splits.Split = split
        self.sentences: list[str] = []
        self.steps: list[amounts.Step] = []
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

    def new_name(self) -> tuple[str, bool]:
        """Draws a name that the story does not have yet; returns it and whether it is a `he`."""
        name, is_he = invention.new_name(self.rng, self.split, self.names)
        self.names.append(name)
        return name, is_he

    def new_things(self) -> str:
        return invention.new_things(self.rng)

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

    def step(self, op: str, a: int, b: int) -> int:
        """Adds a worked step; returns its result."""
        self.steps.append(amounts.worked(op, a, b))
        return self.steps[-1][3]

    def amount(self) -> int:
        return amounts.amount(self.rng)

    def below(self, value: int) -> int:
        return amounts.below(self.rng, value)

    def factors(self) -> tuple[int, int]:
        return amounts.factors(self.rng)

    def divisor(self, value: int) -> int:
        return amounts.divisor(self.rng, value)
