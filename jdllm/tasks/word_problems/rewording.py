"""Says a training question in other words, and spoils it a little, without changing its numbers.

A model that learns from some thousand written problems remembers their wordings, if nothing else
varies. Here synonyms, stems of questions, fillers, joined and split sentences, unknown words and
small mistakes vary. Each change keeps what the question asks, and none touches a number.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from jdllm.tasks.word_problems import mistakes, sentences, strange_words, synonyms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The share of questions that each kind of change applies to; 0 is off.

    `reworded` says the same in other words, `noise` makes mistakes of typing, and `strange_words`
    writes words that nobody knows.
    """

    reworded: float = 0.0
    noise: float = 0.0
    strange_words: float = 0.0


def change(question: str, rng: random.Random, names: Sequence[str], changes: Changes) -> str:
    """Returns the question with the changes that `rng` draws; the same `rng` draws the same."""
    if rng.random() < changes.reworded:
        question = sentences.rearrange(question, rng, names)
        question = replace_synonyms(question, rng, rng.choice((0.2, 0.5, 0.8)))
    if rng.random() < changes.strange_words:
        question = strange_words.put(question, rng, names)
    if rng.random() < changes.noise:
        question = mistakes.make(question, rng)
    return question


def replace_synonyms(text: str, rng: random.Random, share: float) -> str:
    """Returns the text with a share of the phrases of `synonyms` said otherwise.

    A phrase that repeats is always replaced by the same one.
    """
    tokens = text.split(" ")
    chosen: dict[str, str] = {}
    out: list[str] = []
    at = 0
    while at < len(tokens):
        words, phrase, end = _phrase_at(tokens, at)
        if not words:
            out.append(tokens[at])
            at += 1
            continue
        if phrase not in chosen:
            others = synonyms.TABLE[phrase]
            chosen[phrase] = rng.choice(others) if rng.random() < share else ""
        if chosen[phrase]:
            other = chosen[phrase]
            is_capital = tokens[at][:1].isupper()
            out.append((other[0].upper() + other[1:] if is_capital else other) + end)
        else:
            out.extend(tokens[at : at + words])
        at += words
    return " ".join(out)


_MOST_WORDS = max(len(phrase.split()) for phrase in synonyms.TABLE)
_FIRST_WORDS = frozenset(phrase.split()[0].rstrip("?.,") for phrase in synonyms.TABLE)
_END = re.compile(r"[.,?!;:]*$")


def _phrase_at(tokens: Sequence[str], at: int) -> tuple[int, str, str]:
    """Returns (number of words, phrase, punctuation after it) of the longest phrase, or 0."""
    if tokens[at].lower().rstrip("?.,!;:") not in _FIRST_WORDS:
        return 0, "", ""
    for words in range(min(_MOST_WORDS, len(tokens) - at), 0, -1):
        text = " ".join(tokens[at : at + words]).lower()
        if text in synonyms.TABLE:
            return words, text, ""
        end = _END.search(text)
        bare = text[: end.start()] if end else text
        if bare in synonyms.TABLE:
            return words, bare, text[len(bare) :]
    return 0, "", ""
