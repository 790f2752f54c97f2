"""Changes of whole sentences: fillers, openings, stems of questions, joining and splitting."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from jdllm.tasks import words

_BETWEEN = re.compile(
    r"(?<=[a-z0-9%)\"][.?!]) (?=[A-Z\"$\d])(?<!\b[Mm]rs\. )(?<![MD][rs]\. )(?<!\.m\. )"
)

# Sentences that change nothing. {A} is somebody of the text.
FILLERS = words.listed(
    """It is a sunny day.|It was a rainy afternoon.|The weather was fine.|It is a cold morning.
    |Everybody is in a good mood.|That is quite a lot.|This happened last summer.|School is out.
    |It was a busy day.|It is the weekend.|The sky was blue.|Nobody was surprised.|Here is a story.
    |This is about numbers.|Think carefully.|Here is a puzzle.|Read this with care.|Listen to this.
    |The radio was playing.|The dog was asleep.|It smelled of fresh bread.|Dinner was almost ready.
    |There was a lot to do.|Time went by quickly.|Everyone enjoyed it.|It took a while.
    |The birds were singing.|A cat was watching from the window.|Summer had just begun.
    |They all liked it.|What a day!|This is a true story.|Let us see.|Consider the following.""",
    "|",
)
FILLERS_ABOUT = words.listed(
    """{A} is very happy about it.|{A} likes to count things.|{A} loves this.|{A} was a bit tired.
    |{A} is a careful person.|{A} lives in a small town.|{A} had a good breakfast.
    |{A} has a dog named Rex.|{A} always wears a green hat.|{A} is good at school.
    |{A} wants to be a doctor.|{A} enjoys quiet mornings.|{A} has brown hair.
    |{A} told everyone about it.|{A} had planned this for a long time.|{A} is in a hurry.
    |{A} goes to work by bus.|{A} smiled.|{A} sings while working.""",
    "|",
)
OPENINGS = (
    "One day,", "Once,", "As it happens,", "It turns out that", "We know that", "Suppose",
    "Suppose that", "Imagine that", "Imagine", "Let's say", "Let us say that", "Say", "Assume that",
    "Here is what happened:", "Look:", "In this story,", "I heard that", "So,", "Well,", "OK,",
)  # fmt: skip
LEADS = (
    "Please help:", "Please solve this:", "Question:", "Problem:", "Q:", "Solve:", "Hello!", "Hi,",
    "Math problem:", "Can you help me?", "Here's a question:", "Quick question:",
    "Word problem:", "Exercise:", "Solve this problem.", "Answer this question:",
)  # fmt: skip
TAILS = (
    "Show your work.", "Please explain.", "Think step by step.", "Solve it step by step.",
    "Give the answer as a number.", "Thanks!", "Thank you.", "Explain how you got the answer.",
    "Please answer.", "Let's think step by step.", "Just give me the number.", "Answer:", "Hm.",
)  # fmt: skip
BEFORE_QUESTION = (
    "So", "Now", "Then", "In that case,", "Tell me,", "Can you say", "Now tell me:", "I wonder:",
    "My question is:", "The question is:", "So tell me,", "And", "Well,", "All in all,", "Here,",
)  # fmt: skip
ORDERS = (
    "Find", "Calculate", "Work out", "Tell me", "Determine", "Figure out", "Compute", "Say",
    "Please find", "Please tell me", "I want to know", "I would like to know", "We want to know",
)  # fmt: skip
ASKS = ("Can you tell me", "Do you know", "Can you work out", "Could you tell me", "Can you find")
# A sentence that begins with one of these words may lose its capital.
PLAIN_STARTS = frozenset(
    words.listed(
        """He She They It We You The A An Then There This These Each Every His Her Their Our My Your
    Its One Two Three Four Five Six Seven Eight Nine Ten Later Another All Both Some Half In On At
    After Before During For From With Of"""
    )
)

# Stems, after which a question becomes part of another sentence.
_START = r"^(?:So |Now |Then )?"
_STEM = _START + r"([Hh]ow (?:many|much)[^?,]*?|[Ww]hat number of [^?,]*?)"
_WHO = r" (?!be |have |not )((?:the |my |our |each |every )?[\w.-]+)"
_DOES = re.compile(_STEM + " does" + _WHO + r" (have|need|get|pay|own|make|earn)\b([^?,]*)\?$")
_MODAL = re.compile(_STEM + " (will|can|did|do|must|should)" + _WHO + r" (\w+)\b([^?,]*)\?$")
_ARE = re.compile(_STEM + r" (are|were|is|was) there\b([^?,]*)\?$")
_SUBJECT = re.compile(
    _START + r"([Hh]ow (?:many|much)(?: [\w-]+){0,3} (?:are|were|is|was|remain|stay)\b[^?,]*)\?$"
)
_PAST = dict(
    pair.split(":")
    for pair in words.listed(
        """have:had get:got pay:paid make:made buy:bought sell:sold eat:ate give:gave spend:spent
        find:found lose:lost use:used earn:earned need:needed start:started collect:collected
        pick:picked receive:received read:read save:saved bake:baked walk:walked keep:kept own:owned
        begin:began take:took bring:brought"""
    )
)


def rearrange(text: str, rng: random.Random, names: Sequence[str]) -> str:
    """Returns the text with some changes of its sentences."""
    parts = _BETWEEN.split(text)
    for share, step in _CHANGES:
        if rng.random() < share:
            parts = step(parts, rng, names)
    return " ".join(parts)


Sentences = list[str]


def _fill(parts: Sentences, rng: random.Random, names: Sequence[str]) -> Sentences:
    """Adds a sentence without numbers before the question."""
    if names and rng.random() < 0.5:
        filler = rng.choice(FILLERS_ABOUT).replace("{A}", names[0])
        filler = filler[0].upper() + filler[1:]
        place = rng.randint(min(1, len(parts) - 1), max(len(parts) - 1, 0))
    else:
        filler = rng.choice(FILLERS)
        place = 0 if rng.random() < 0.6 else rng.randint(0, max(len(parts) - 1, 0))
    return [*parts[:place], filler, *parts[place:]]


def _open(parts: Sentences, rng: random.Random, _names: Sequence[str]) -> Sentences:
    first = parts[0]
    if first.endswith("?") or first.startswith(("If", "When", "After", "How", "What", "Find")):
        return parts
    return [f"{rng.choice(OPENINGS)} {_uncapitalised(first)}", *parts[1:]]


def _frame(parts: Sentences, rng: random.Random, _names: Sequence[str]) -> Sentences:
    if rng.random() < 0.5:
        return [rng.choice(LEADS), *parts]
    return [*parts, rng.choice(TAILS)]


def _join(parts: Sentences, rng: random.Random, _names: Sequence[str]) -> Sentences:
    """Makes one sentence of two that follow each other."""
    places = [
        i
        for i in range(len(parts) - 1)
        if parts[i].endswith(".") and parts[i + 1].endswith(".") and len(parts[i]) > 12
    ]
    if not places:
        return parts
    i = rng.choice(places)
    link = rng.choice((", and ", " and ", "; ", ", and then ", " - ", ", while ", ", "))
    if link != "; " and " and " in parts[i + 1][:40]:
        link = "; "
    joined = parts[i][:-1] + link + _uncapitalised(parts[i + 1])
    return [*parts[:i], joined, *parts[i + 2 :]]


_IF = re.compile(r"^If ([^,?]+), (?:then )?((?:how|what) [^?]+\?)$")
_SPLIT = re.compile(
    r"(?<=[a-z0-9]), (?:and|but|then|and then) (he|she|they|it|the|there|we|I|you) "
)


def _split(parts: Sentences, _rng: random.Random, _names: Sequence[str]) -> Sentences:
    out = []
    for part in parts:
        if part.startswith(("If ", "When ", "How ", "After ")):
            out.append(part)
        else:
            out += _SPLIT.sub(lambda match: f".\0{match[1].capitalize()} ", part).split("\0")
    return out


def _suppose(parts: Sentences, rng: random.Random, _names: Sequence[str]) -> Sentences:
    """Says "If ..., how many" instead of two sentences, or the other way round."""
    *before, last = parts
    if match := _IF.match(last):
        first, question = match.groups()
        return [*before, _capitalised(first) + ".", _capitalised(question)]
    if before and before[-1].endswith(".") and last.startswith(("How ", "What ")):
        condition, rest = before[-1][:-1], last[0].lower() + last[1:]
        if not condition.startswith(("If ", "When ", "Suppose", "Find")) and rng.random() < 0.5:
            return [*before[:-1], f"If {_uncapitalised(condition)}, {rest}"]
    return parts


def _ask_first(parts: Sentences, _rng: random.Random, _names: Sequence[str]) -> Sentences:
    return [parts[-1], *parts[:-1]]


def _stem(parts: Sentences, rng: random.Random, _names: Sequence[str]) -> Sentences:
    """Asks with another stem: "Find how many apples Tom has now."."""
    return [*parts[:-1], _asked(parts[-1], rng)]


def _asked(question: str, rng: random.Random) -> str:
    embedded = _embedded(question)
    if embedded is None or rng.random() < 0.3:
        if question.startswith(("How ", "What ")):
            before = rng.choice(BEFORE_QUESTION)
            return f"{before} {question[0].lower()}{question[1:]}"
        return question
    embedded = embedded[0].lower() + embedded[1:]
    if rng.random() < 0.7:
        return f"{rng.choice(ORDERS)} {embedded}."
    return f"{rng.choice(ASKS)} {embedded}?"


def _embedded(question: str) -> str | None:
    """Returns "how many apples Tom has now" for "How many apples does Tom have now?"."""
    if match := _DOES.match(question):
        stem, who, verb, rest = match.groups()
        return f"{stem} {who} {'has' if verb == 'have' else verb + 's'}{rest}"
    if match := _MODAL.match(question):
        stem, modal, who, verb, rest = match.groups()
        if modal == "do":
            return f"{stem} {who} {verb}{rest}"
        if modal == "did":
            return f"{stem} {who} {_PAST[verb]}{rest}" if verb in _PAST else None
        return f"{stem} {who} {modal} {verb}{rest}"
    if match := _ARE.match(question):
        stem, are, rest = match.groups()
        return f"{stem} there {are}{rest}"
    if match := _SUBJECT.match(question):
        return match[1]
    return None


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _uncapitalised(sentence: str) -> str:
    first = sentence.split(" ", 1)[0].rstrip(",")
    return sentence[0].lower() + sentence[1:] if first in PLAIN_STARTS else sentence


_CHANGES: tuple[
    tuple[float, Callable[[Sentences, random.Random, Sequence[str]], Sentences]], ...
] = (
    (0.3, _stem),
    (0.3, _suppose),
    (0.2, _join),
    (0.2, _split),
    (0.12, _open),
    (0.03, _ask_first),
    (0.15, _fill),
    (0.05, _frame),
)
