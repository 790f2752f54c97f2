"""Which combinations and phrasings of scenes training never shows, decided by a stable hash."""

from __future__ import annotations

import functools
import hashlib

# Chosen so that the plainest captions ("a red circle") stay in training, and so that every
# colour, shape and role has both kinds (tests/tasks/test_scenes.py counts them).
COMBINATION_SALT = "scene 6/"
PHRASING_SALT = "words 830/"

# The role of the other shape of a relation; the names on the left are those that captions state.
INVERSES = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
    "inside": "around",
}
UNRELATED = "unrelated"
ROLES = (*INVERSES, "around", UNRELATED)


@functools.cache
def is_held_out_combination(colour: str, shape: str, role: str) -> bool:
    """Returns whether training never shows such a shape in this role; about one in eight is so."""
    return _is_one_in_eight(f"{COMBINATION_SALT}{colour}|{shape}|{role}")


@functools.cache
def is_held_out_phrasing(family: str, one: str, other: str) -> bool:
    """Returns whether training never shows this pair of entries; about one in eight is so."""
    return _is_one_in_eight(f"{PHRASING_SALT}{family}|{one}|{other}")


def _is_one_in_eight(text: str) -> bool:
    # Not a CRC: it is linear, so every salt would pick the same pattern of rows.
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0
