"""Replaces things, people and harmless verbs by words that nobody knows.

What is counted, and by whom, does not matter for the answer. So a model must not need to know
these words. A verb is only replaced where the question does not depend on its meaning: where it
makes or moves things (the sentence says how many), or where the question asks what is left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from jdllm.tasks import invention, words
from jdllm.tasks.word_problems import number_words

# Words that say what to calculate, or of which unit a number is.
KEPT = number_words.WORDS | frozenset(
    words.listed(
        """more less fewer than each every apiece total altogether all both together combined left
        rest remaining remain remains other others another same half halves third quarter twice
        double triple times time dozen dozens pair pairs couple few many much number numbers sum
        difference product equal equally evenly share shares split part parts group groups price
        cost costs money change dollars dollar cents cent euros euro pounds hours hour days day
        weeks week months month years year minutes minute seconds second nights night mornings
        morning afternoon evening end beginning first next last start km cm kg metres meters
        kilometres kilometers litres liters grams miles feet inches percent degrees old older
        younger years people persons of the these those them they this that what how whole
        bigger larger smaller taller shorter longer heavier lighter further extra additional
        points rows row way ways once again too just only full empty new one ones is are was
        were has had does apiece"""
    )
)
MAKING = words.listed(
    """bakes knits paints reads writes types prints draws folds packs stacks sews builds plants
    picks harvests runs walks drives jogs swims rides cycles grows raises fills sorts
    prepares sets carries baked knitted painted typed printed folded packed stacked sewed
    planted picked harvested walked jogged sorted filled prepared carried"""
)
LOSING = words.listed(
    """eats sells loses breaks drops burns ruins spends donates discards drinks rips spills
    pops melts sold lost broke dropped burned ruined spent donated discarded popped melted
    ripped ate"""
)

_COUNTED = re.compile(r"(?<![\w$])(?:\d+|[Hh]ow many|more|of the|of h(?:is|er)) ([a-z]{3,}s)\b")
_SOMEBODY = re.compile(r"\b(?:[Tt]he|[Aa]n?) ([a-z]{4,}[^s\W])\b")
_ASKS_REST = re.compile(r"\b(?:left|remain\w*|still)\b[^.?!]*\?$")
_MAKING = re.compile(r"\b(" + "|".join(MAKING) + r")\b")
_LOSING = re.compile(r"\b(" + "|".join((*MAKING, *LOSING)) + r")\b")
_THINGS = tuple(thing for thing in words.THINGS if " " not in thing)


def put(text: str, rng: random.Random, names: Sequence[str]) -> str:
    """Returns the text with one or two words replaced wherever they stand."""
    for _ in range(rng.choice((1, 1, 2))):
        draw = rng.random()
        if draw < 0.55:
            text = _replace_things(text, rng)
        elif draw < 0.75:
            text = _replace_somebody(text, rng, names)
        else:
            text = _replace_verb(text, rng)
    return text


def _replace_things(text: str, rng: random.Random) -> str:
    found = sorted(set(_COUNTED.findall(text)) - KEPT)
    if not found:
        return text
    old = rng.choice(found)
    new = rng.choice(_THINGS) if rng.random() < 0.4 else _unknown(rng).rstrip("s") + "s"
    text = re.sub(rf"\b{old}\b", new, text)
    # The singular too ("each apple"), unless it is another word.
    single = old.removesuffix("s")
    return re.sub(rf"\b{single}\b", new.removesuffix("s"), text) if single not in KEPT else text


def _replace_somebody(text: str, rng: random.Random, names: Sequence[str]) -> str:
    known = KEPT | {word for name in names for word in name.split()}
    found = sorted(set(_SOMEBODY.findall(text)) - known)
    if not found:
        return text
    old = rng.choice(found)
    return re.sub(rf"\b{old}(s?)\b", _unknown(rng) + r"\1", text)


def _replace_verb(text: str, rng: random.Random) -> str:
    pattern = _LOSING if _ASKS_REST.search(text) else _MAKING
    found = sorted(set(pattern.findall(text)))
    if not found:
        return text
    old = rng.choice(found)
    new = _unknown(rng).rstrip("s") + ("s" if old.endswith("s") else "ed")
    return re.sub(rf"\b{old}\b", new, text)


def _unknown(rng: random.Random) -> str:
    """Returns a made-up word that no reader could take for one that matters."""
    while True:
        word = invention.invented(rng)
        if len(word) > 2 and word not in KEPT and word.capitalize() not in words.TEST_NAMES:
            return word
