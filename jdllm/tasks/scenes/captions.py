"""Captions: noun phrases of the groups, a frame that relates them, an opener and the ground.

Every draw that belongs to a phrasing is noted as a pair (see `splits`); the caller draws another
caption when the pairs do not suit the split.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from jdllm.tasks.scenes import words
from jdllm.tasks.scenes.scene import Group

Relations = Sequence[tuple[int, str, int]]
Pair = tuple[str, str, str]  # family, entry, entry
Place = Literal["after", "before", "sentence"]  # of the ground, to what is seen
GROUND_FRAMES: dict[Place, tuple[str, ...]] = {
    "after": words.GROUND_AFTER,
    "before": words.GROUND_BEFORE,
    "sentence": words.GROUND_SENTENCES,
}
PLAIN = 0.55  # share of the first, plain entry of a table


class Caption:
    """A caption under construction; `text` is the caption, `pairs` its phrasings."""

    def __init__(
        self,
        rng: random.Random,
        groups: Sequence[Group],
        relations: Relations,
        ground: str | None,
    ):
        self.rng = rng
        self.pairs: list[Pair] = []
        is_sentence = bool(relations) and rng.random() < 0.3
        self.opener = self._plain(words.SENTENCE_OPENERS if is_sentence else words.NOUN_OPENERS)
        self.article = rng.choices(("a", "one", ""), (17, 1, 2))[0]
        self.nouns = [self._plain(words.NOUNS[group.shape]) for group in groups]
        self.colours = [self._plain(words.COLOURS[group.colour]) for group in groups]
        self.relations = [(name, self._plain(words.RELATIONS[name])) for _, name, _ in relations]
        self.text = self._tell(self._content(groups, relations, is_sentence), ground)
        self._note_pairs()

    def _plain(self, table: tuple[str, ...]) -> str:
        """Draws an entry, mostly the first."""
        rng = self.rng
        return table[0] if rng.random() < PLAIN else rng.choice(table)

    def _note_pairs(self) -> None:
        self.pairs += [("noun", self.opener, noun) for noun in self.nouns]
        self.pairs += [("colour", self.opener, colour) for colour in self.colours]
        self.pairs += [("relation", self.opener, wording) for _, wording in self.relations]

    # What is seen

    def _content(self, groups: Sequence[Group], relations: Relations, is_sentence: bool) -> str:
        order = _order(len(groups), relations)
        if not relations:
            self.rng.shuffle(order)
        frame = self.rng.choice(_frames(len(groups), relations, is_sentence))
        self.pairs.append(("frame", self.opener, frame))
        a, b = order[0], order[min(1, len(order) - 1)]
        slots = {letter: self._noun_phrase(groups[i], i) for letter, i in zip("abc", order)}
        slots |= {
            "A": self._again(groups[a], a),
            "B": self._again(groups[b], b),
            "is": "is" if groups[a].count == 1 else "are",
            "are": "is" if groups[order[-1]].count == 1 else "are",
            "it": "it" if groups[b].count == 1 else "them",
        }
        slots |= {key: wording for key, (_, wording) in zip(("rel", "rel2"), self.relations)}
        return frame.format(**slots)

    def _noun_phrase(self, group: Group, index: int) -> str:
        rng = self.rng
        noun = _plural(self.nouns[index]) if group.count > 1 else self.nouns[index]
        size = self._plain(words.SIZES[group.size]) if group.states_size else ""
        if size:
            self.pairs.append(("size", size, self.nouns[index]))
        colour = self.colours[index] if group.states_colour else ""
        if size and colour and rng.random() < 0.1:
            adjectives = rng.choice((f"{size} and {colour}", f"{colour} and {size}"))
            be = "is" if group.count == 1 else "are"
            phrase = words.RELATIVE_PHRASE.format(noun=noun, be=be, adjectives=adjectives)
        elif colour and rng.random() < 0.12:
            phrase = words.NOUN_PHRASES[1].format(size=size, colour=colour, noun=noun)
        else:
            phrase = words.NOUN_PHRASES[0].format(size=size, colour=colour, noun=noun)
        phrase = " ".join(phrase.split())
        if group.count > 1:
            number = self._plain(words.COUNTS[group.count])
            self.pairs.append(("count", number, self.nouns[index]))
            return f"{number} {phrase}"
        if self.article == "a":
            return _with_article(phrase)
        return f"{self.article} {phrase}".strip()

    def _again(self, group: Group, index: int) -> str:
        noun = _plural(self.nouns[index]) if group.count > 1 else self.nouns[index]
        return f"the {self.colours[index]} {noun}" if group.states_colour else f"the {noun}"

    # How it is told

    def _tell(self, content: str, ground: str | None) -> str:
        rng = self.rng
        is_plural = content.split()[0] in ("two", "three", "2", "3")
        verb = "are" if is_plural else "is"
        body, mark = self.opener.replace("{is}", verb), ""
        if body.endswith("?"):
            body, mark = body[:-1], "?"
        last = ""
        if ground is None:
            text = body.format(x=content)
        else:
            place, frame, colour = self._ground(ground)
            slots = {"g": _with_article(colour), "colour": colour}
            match place:
                case "after":
                    text = body.format(x=frame.format(x=content, **slots))
                case "before":
                    text = frame.format(x=body.format(x=content), **slots)
                case "sentence":
                    text, last = body.format(x=content), frame.format(**slots)
        is_formal = bool(mark) or rng.random() < 0.4
        if not is_formal:
            return f"{text}, {last}" if last else text
        text = f"{_capital(text)}{mark or '.'}"
        return f"{text} {_capital(last)}." if last else text

    def _ground(self, ground: str) -> tuple[Place, str, str]:
        """Draws where the ground is told, in what frame, and the word for its colour."""
        colour = self._plain(words.COLOURS[ground])
        place = self.rng.choices(tuple(GROUND_FRAMES), (6, 2, 2))[0]
        frame = self._plain(GROUND_FRAMES[place])
        self.pairs.append(("ground", self.opener, frame))
        self.pairs.append(("ground colour", frame, colour))
        return place, frame, colour


def _order(count: int, relations: Relations) -> list[int]:
    """Returns the groups in the order of a frame's letters: a relates to b, c is the rest."""
    if not relations:
        return list(range(count))
    first = [relations[0][0], relations[0][2]]
    return first + [i for i in range(count) if i not in first]


def _frames(count: int, relations: Relations, is_sentence: bool) -> tuple[str, ...]:
    match list(relations):
        case []:
            return words.LIST_FRAMES[count]
        case [(_, name, _)] if count == 2:
            around = words.AROUND_FRAMES if name == "inside" else ()
            return words.PAIR_SENTENCES if is_sentence else words.PAIR_FRAMES + around
        case [_]:
            return words.EXTRA_SENTENCES if is_sentence else words.EXTRA_FRAMES
        case [(a, _, _), (subject, _, _)] if a == subject:
            return words.SHARED_SUBJECT_SENTENCES if is_sentence else words.SHARED_SUBJECT_FRAMES
        case _:
            return words.SHARED_OBJECT_SENTENCES if is_sentence else words.SHARED_OBJECT_FRAMES


def _plural(noun: str) -> str:
    return words.PLURALS.get(noun, f"{noun}s")


def _with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
