"""The text of a written problem: choices made, people, things and numbers filled in."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence

from jdllm.tasks import invention
from jdllm.tasks.splits import Split
from jdllm.tasks.word_problems import number_words, persons
from jdllm.tasks.word_problems.written import Parts, Wording

WORDED_SHARE = 0.15  # of the texts, those whose numbers may be words
ROLE_SHARE = 0.08  # of the main people in training, those who are no name but "my uncle"

# Who may stand where a name may; (text, is a `he`).
ROLES = tuple(
    (text, group == 0)
    for group, texts in enumerate(
        (
            "my brother|my uncle|my dad|Grandpa|Mr. Lee|Mr. Brown|our neighbour|the farmer|"
            "the baker|the shopkeeper|the teacher|the boy|the coach|the painter|the gardener|Dad",
            "my sister|my aunt|my mum|Grandma|Mrs. Hill|Ms. Green|our neighbor|the farmer|"
            "the baker|the shop owner|the teacher|the girl|the coach|the student|the librarian|Mum",
        )
    )
    for text in texts.split("|")
)
HE = {"he": "he", "him": "him", "his": "his", "himself": "himself"}
SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}

# Beside these a number stays in digits.
_NO_WORDS_AFTER = ("$", "#", "£", "€")
_NO_WORDS = tuple("%:/")
_SPACES = re.compile(r" {2,}")
_SPACE_BEFORE = re.compile(r" +([,.?!;:])")
_SENTENCE_START = re.compile(r"(?<![ap]\.m)([.?!] )([a-z])")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Somebody in a text; the main person comes first."""

    text: str
    is_he: bool


def render(
    wording: Wording,
    values: Mapping[str, int],
    rng: random.Random,
    split: Split,
    *,
    spoken_share: float = 0.0,
) -> tuple[str, tuple[str, ...]]:
    """Returns the text and the names in it; `values` are of all variables that it shows.

    `spoken_share` is the share of the texts that "I" or "you" tell instead of a name.
    """
    slots = wording.slots
    cast = [letter for letter in "ABD" if any(slot[0] == letter for slot in slots)]
    people = dict(zip(cast, _people(len(cast), rng, split), strict=True))
    texts = {f"{{{letter}}}": person.text for letter, person in people.items()}
    for slot in slots:
        if "." in slot:
            texts[f"{{{slot}}}"] = _pronoun(people[slot[0]], slot[2:])
    if "o" in slots or "p" in slots:
        texts["{o}"] = invention.new_things(rng)
        texts["{p}"] = texts["{o}"]
        while "p" in slots and texts["{p}"] == texts["{o}"]:
            texts["{p}"] = invention.new_things(rng)
    chosen: list[str] = []
    _choose(wording.parts, rng, chosen)
    _show_numbers(chosen, values, rng)
    if "A" in people and rng.random() < spoken_share:
        speaker = persons.draw(rng)
        spoken = tidy(_filled(chosen, texts | speaker.texts))
        told = persons.conjugate(spoken, speaker, is_alone=len(people) == 1)
        if told is not None:
            names = tuple(person.text for letter, person in people.items() if letter != "A")
            return tidy(told), names
    return tidy(_filled(chosen, texts)), tuple(person.text for person in people.values())


def _filled(chosen: Sequence[str], texts: Mapping[str, str]) -> str:
    return "".join([texts.get(part, part) for part in chosen])


def _show_numbers(chosen: list[str], values: Mapping[str, int], rng: random.Random) -> None:
    """Replaces the slots of numbers by digits, or sometimes by words."""
    may_spell = rng.random() < WORDED_SHARE
    for i, part in enumerate(chosen):
        if len(part) == 3 and part[0] == "{" and part[1] in values:
            value = values[part[1]]
            after = chosen[i + 1] if i + 1 < len(chosen) else ""
            before = chosen[i - 1] if i else ""
            is_plain = not before.endswith(_NO_WORDS_AFTER) and after[:1] not in _NO_WORDS
            spells = may_spell and is_plain
            chosen[i] = number_words.sometimes(value, rng) if spells else str(value)


def tidy(text: str) -> str:
    """Returns the text with single spaces and sentences that begin with a capital."""
    text = _SPACE_BEFORE.sub(r"\1", _SPACES.sub(" ", text)).strip()
    text = _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
    return text[:1].upper() + text[1:]


def _people(count: int, rng: random.Random, split: Split) -> list[Person]:
    people: list[Person] = []
    for _ in range(count):
        if split == "train" and not people and rng.random() < ROLE_SHARE:
            text, is_he = rng.choice(ROLES)
        else:
            text, is_he = invention.new_name(rng, split, [p.text for p in people])
        people.append(Person(text=text, is_he=is_he))
    return people


def _pronoun(person: Person, form: str) -> str:
    text = (HE if person.is_he else SHE)[form.lower()]
    return text.capitalize() if form[0].isupper() else text


def _choose(parts: Parts, rng: random.Random, chosen: list[str]) -> None:
    for part in parts:
        if isinstance(part, str):
            chosen.append(part)
        else:
            _choose(part[int(rng.random() * len(part))], rng, chosen)
