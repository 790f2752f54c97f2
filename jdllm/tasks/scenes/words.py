"""The vocabulary of the scenes' captions: nouns, adjectives, relations and sentence frames.

This module holds data only. A phrasing is a pair of entries of two tables. A hash in `splits`
decides which pairs training never shows, so a table can grow without a second list. The first
entry of a table of synonyms is the plain word, and is drawn most often.

Placeholders: {a}, {b}, {c} the groups of shapes as noun phrases, {B} and {A} a group that was
named before ("the red ring"), {rel} and {rel2} the wordings of relations, {is} and {are} the verb
for {a} and {c}, {it} the pronoun of {b}, {x} what an opener introduces, {g} the ground's colour
with its article, {colour} without.
"""

from __future__ import annotations

NOUNS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "disk"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star", "five-pointed star"),
    "ring": ("ring", "hoop"),
}
PLURALS = {"box": "boxes"}  # every other noun takes an s

SIZES: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "medium-sized", "mid-sized"),
    "large": ("large", "big", "huge"),
}

COLOURS: dict[str, tuple[str, ...]] = {
    "red": ("red",),
    "orange": ("orange",),
    "yellow": ("yellow",),
    "green": ("green",),
    "cyan": ("cyan", "turquoise"),
    "blue": ("blue",),
    "purple": ("purple", "violet"),
    "pink": ("pink",),
    "white": ("white",),
    "gray": ("gray", "grey"),
    "black": ("black",),
}

COUNTS: dict[int, tuple[str, ...]] = {
    2: ("two", "2", "a pair of", "a couple of"),
    3: ("three", "3"),
}

NOUN_PHRASES = ("{size} {colour} {noun}", "{size} {noun} in {colour}")
RELATIVE_PHRASE = "{noun} that {be} {adjectives}"

RELATIONS: dict[str, tuple[str, ...]] = {
    "left of": ("to the left of", "left of", "on the left of", "on the left side of"),
    "right of": ("to the right of", "right of", "on the right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath", "underneath"),
    "inside": ("inside", "within", "in", "inside of"),
}

# What an opener introduces: noun phrases, or whole sentences.
NOUN_OPENERS = (
    "{x}",
    "draw {x}",
    "paint {x}",
    "show {x}",
    "show me {x}",
    "please draw {x}",
    "make a picture of {x}",
    "generate an image of {x}",
    "a picture of {x}",
    "an image of {x}",
    "a drawing of {x}",
    "a simple scene with {x}",
    "an illustration showing {x}",
    "there {is} {x}",
    "I see {x}",
    "I would like to see {x}",
    "can you draw {x}?",
    "could you paint {x}, please?",
)
SENTENCE_OPENERS = (
    "{x}",
    "a picture where {x}",
    "a scene in which {x}",
    "draw a picture where {x}",
    "in this image {x}",
    "paint a scene in which {x}",
)

# Contents, by the groups and relations that they tell. `list` tells no relation.
LIST_FRAMES: dict[int, tuple[str, ...]] = {
    1: ("{a}",),
    2: ("{a} and {b}", "{a} with {b}", "{a} plus {b}", "{a} together with {b}"),
    3: ("{a}, {b} and {c}", "{a} and {b} and {c}", "{a}, {b}, and also {c}", "{a}, {b}, {c}"),
}
PAIR_FRAMES = (
    "{a} {rel} {b}",
    "{a} that {is} {rel} {b}",
    "{a} placed {rel} {b}",
    "{b} with {a} {rel} {it}",
    "{a} and {b}, {A} {rel} {B}",
)
PAIR_SENTENCES = (
    "{a} {is} {rel} {b}",
    "{rel} {b} {is} {a}",
    "{rel} {b} there {is} {a}",
    "there {is} {a} {rel} {b}",
)
# For `inside`: the outer shape as the subject.
AROUND_FRAMES = ("{b} around {a}", "{b} containing {a}", "{a} surrounded by {b}")

# a rel b, a rel2 c
SHARED_SUBJECT_FRAMES = (
    "{a} {rel} {b} and {rel2} {c}",
    "{a} that {is} {rel} {b} and {rel2} {c}",
    "{a}, {rel} {b} but {rel2} {c}",
)
SHARED_SUBJECT_SENTENCES = (
    "{a} {is} {rel} {b} and {rel2} {c}",
    "{rel} {b} and {rel2} {c} there {is} {a}",
)
# a rel b, c rel2 b
SHARED_OBJECT_FRAMES = (
    "{a} {rel} {b}, and {c} {rel2} {B}",
    "{b} with {a} {rel} {it} and {c} {rel2} {it}",
)
SHARED_OBJECT_SENTENCES = (
    "{a} {is} {rel} {b}, and {c} {are} {rel2} {B}",
    "{a} {is} {rel} {b} while {c} {are} {rel2} {B}",
)
# a rel b, and c somewhere
EXTRA_FRAMES = ("{a} {rel} {b}, and also {c}", "{c}, and {a} {rel} {b}", "{a} {rel} {b}, plus {c}")
EXTRA_SENTENCES = ("{a} {is} {rel} {b}, and there {are} {c}",)

# Where the ground is told: in the opener's text, before it, or in a sentence of its own.
GROUND_AFTER = (
    "{x} on {g} background",
    "{x} on {g} backdrop",
    "{x} against {g} background",
    "{x} against {g} backdrop",
    "{x} on {g} ground",
)
GROUND_BEFORE = ("on {g} background, {x}", "against {g} backdrop, {x}", "on {g} ground, {x}")
GROUND_SENTENCES = (
    "the background is {colour}",
    "the backdrop is {colour}",
    "use {g} background",
)
