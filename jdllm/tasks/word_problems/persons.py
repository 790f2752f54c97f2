"""Tells a problem about "I" or "you" instead of somebody with a name.

English verbs follow the person: "Tom has" becomes "I have". Where this is not plain, as where a
name may be subject or object, nothing is told otherwise.
"""

from __future__ import annotations

import dataclasses
import random
import re

from jdllm.tasks import words
from jdllm.tasks.word_problems import strange_words

NAME, HE = "\1", "\2"  # where a text names the person, and where it says "he" or "she"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """The words for one person, and its forms of "be"."""

    subject: str
    other: str  # "me"
    possessive: str
    himself: str
    be: dict[str, str]

    @property
    def texts(self) -> dict[str, str]:
        """What stands in the slots of {A}."""
        return {
            "{A}": NAME,
            "{A.he}": HE,
            "{A.He}": HE,
            "{A.him}": self.other,
            "{A.Him}": self.other,
            "{A.his}": self.possessive,
            "{A.His}": self.possessive.capitalize(),
            "{A.himself}": self.himself,
        }


SPEAKERS = (
    Speaker(
        subject="I",
        other="me",
        possessive="my",
        himself="myself",
        be={"is": "am", "isn't": "am not"},
    ),
    Speaker(
        subject="you",
        other="you",
        possessive="your",
        himself="yourself",
        be={"is": "are", "was": "were", "isn't": "aren't", "wasn't": "weren't"},
    ),
)
_HAVE_AND_DO = {
    "has": "have",
    "does": "do",
    "hasn't": "haven't",
    "doesn't": "don't",
    "goes": "go",
}
_PREPOSITIONS = frozenset(words.listed("to for from with by at of than behind between like as"))
_BEFORE_SUBJECT = frozenset(
    words.listed(
        """and but if when then so that while because after before once does did will can has had is
        was do have would should could must until where what since"""
    )
)
_ADVERBS = frozenset(words.listed("also then now still only just already always later first"))
_NO_VERBS = frozenset(words.listed("was this his its always across less perhaps"))
_VERB_WORDS = frozenset(
    verb.split()[0] for _, verbs in words.FAMILIES.values() for verb in verbs if verb
) | {v for v in (*strange_words.MAKING, *strange_words.LOSING) if v.endswith("s")}
_END = re.compile(r"[.,?!;:]+$")


def draw(rng: random.Random) -> Speaker:
    return rng.choice(SPEAKERS)


def conjugate(text: str, speaker: Speaker, *, is_alone: bool) -> str | None:
    """Returns the text with the person's words and verbs, or None where that is not plain.

    `is_alone` says that the text is about nobody else, so that verbs after "and" are this person's.
    """
    tokens = text.split(" ")
    forms = _HAVE_AND_DO | speaker.be
    for i, token in enumerate(tokens):
        bare = _END.sub("", token)
        if bare == NAME + "'s":
            if tokens[i + 1 : i + 2] and tokens[i + 1] in ("got", "been", "a", "the"):
                return None
            tokens[i] = token.replace(bare, speaker.possessive)
        elif bare in (NAME, HE):
            is_subject = bare == HE or _is_subject(tokens, i)
            if is_subject is None or (token != bare and tokens[i + 1 : i + 2] == ["who"]):
                return None
            tokens[i] = token.replace(bare, speaker.subject if is_subject else speaker.other)
            if is_subject:
                _conjugate_around(tokens, i, forms)
        elif NAME in token or HE in token:
            return None
        elif is_alone and bare in _VERB_WORDS and i and tokens[i - 1] in ("and", "but", "then"):
            tokens[i] = token.replace(bare, _base(bare, forms))
    return " ".join(tokens)


def _is_subject(tokens: list[str], i: int) -> bool | None:
    """Returns whether a name is a subject; None if that is not plain."""
    before = tokens[i - 1].lower() if i else "."
    if before in _PREPOSITIONS:
        return False
    if _END.search(before) or before in _BEFORE_SUBJECT:
        return True
    after = tokens[i + 1] if i + 1 < len(tokens) and tokens[i] == NAME else ""
    looks_like_verb = after.isalpha() and after.islower() and after.endswith(("s", "ed", "had"))
    return True if looks_like_verb and after not in _NO_VERBS else None


def _conjugate_around(tokens: list[str], i: int, forms: dict[str, str]) -> None:
    """Changes the verb after a subject, or the auxiliary before it."""
    before = tokens[i - 1] if i else ""
    if before.lower() in forms and not _END.search(before):
        changed = forms[before.lower()]
        tokens[i - 1] = changed.capitalize() if before[0].isupper() else changed
        return
    at = i + 1
    while at < len(tokens) and (tokens[at] in _ADVERBS or tokens[at].endswith("ly")):
        at += 1
    if at >= len(tokens) or _END.search(tokens[i]):
        return
    bare = _END.sub("", tokens[at])
    is_verb = bare in forms or (bare.isalpha() and bare.islower() and bare.endswith("s"))
    if is_verb and bare not in _NO_VERBS - forms.keys():
        tokens[at] = tokens[at].replace(bare, _base(bare, forms))


def _base(verb: str, forms: dict[str, str]) -> str:
    if verb in forms:
        return forms[verb]
    if verb.endswith("ies") and len(verb) > 4:
        return verb[:-3] + "y"
    if verb.endswith(("sses", "ches", "shes", "xes", "zes")):
        return verb[:-2]
    return verb if verb.endswith("ss") else verb.removesuffix("s")
