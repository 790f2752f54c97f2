"""Word problems that were written as whole texts, and the parser of their files.

A large language model wrote them, one by one and without a program.

A file of `problems/` holds problems that blank lines separate; `#` begins a comment line:

    @ a*b ; r1-c | a 2-9, b 4-12
    {A} fills {a} jars with {b} pickles each. {A.He} eats {c} of them. How many are left?
    There are {b} pickles in each of {A}'s {a} jars, [but|and] {c} get eaten. How many stay?

The `@` line holds one to three steps. An operand is a variable a to f (a number that the question
shows), a constant ("twice", "a dozen", "a week"), or the result r1 or r2 of an earlier step. Ranges
of variables may follow. One to four lines are wordings of the whole problem: {A}, {B} and {D} are
people, with pronouns ({A.he}, {A.His}), {o} and {p} are things, and [one|other] is a choice.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from jdllm.tasks import splits

FOLDER = pathlib.Path(__file__).parent / "problems"
# Problems for the next training run. Once in FOLDER they change the splits, and so the figures of
# the models that are bundled now.
NEXT_FOLDER = FOLDER / "next"
MAX_STEPS, MAX_WORDINGS = 3, 4
PRONOUNS = ("he", "him", "his", "himself", "He", "Him", "His")

_STEP = re.compile(r"\s*([a-f]|r[12]|\d+)\s*([-+*/])\s*([a-f]|r[12]|\d+)\s*")
_RANGE = re.compile(r"\s*([a-f]) (\d+)-(\d+)\s*")
_SLOT = re.compile(r"[a-f]|[ABD](?:\.(?:" + "|".join(PRONOUNS) + r"))?|[op]")
_PART = re.compile(r"(\{[^{}]*\}|\[[^\[\]]*\])")

# Literal texts and slots ("{a}") of a wording, and its choices, each of several lists of parts.
Parts = tuple["str | tuple[Parts, ...]", ...]
Operand = str | int  # a variable, r1 or r2, or a constant
Steps = tuple[tuple[str, Operand, Operand], ...]  # (op, x, y)
Value = TypeVar("Value", bound=Hashable)


class WrittenError(ValueError):
    """A fault of a file; the message names the file and the line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """One way to tell a problem; `slots` are all that any of its choices may show."""

    parts: Parts
    slots: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProblem:
    """A problem with its wordings. `key` names it in the splits, `place` in messages."""

    place: str
    key: str
    steps: Steps
    ranges: Mapping[str, tuple[int, int]]
    wordings: tuple[Wording, ...]

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the steps use."""
        operands = (operand for _, x, y in self.steps for operand in (x, y))
        return frozenset(o for o in operands if isinstance(o, str) and o in "abcdef")


@functools.cache
def of_split(split: splits.Split) -> tuple[WrittenProblem, ...]:
    """Returns the problems that training shows, or those that it never shows ("test")."""
    is_test = split == "test"
    return tuple(p for p in everything() if splits.is_held_out_problem(p.key) == is_test)


@functools.cache
def everything() -> tuple[WrittenProblem, ...]:
    """Returns the problems that the bundled models were trained on, or that their test asks."""
    return read(FOLDER)


def read(folder: pathlib.Path) -> tuple[WrittenProblem, ...]:
    """Returns the problems of all files of a folder; a problem that repeats counts once."""
    found: dict[str, WrittenProblem] = {}
    for path in sorted(folder.glob("*.txt")):
        for problem in parse(path.read_text(encoding="utf-8"), path.name):
            found.setdefault(problem.key, problem)
    return tuple(found.values())


def parse(text: str, name: str) -> Iterator[WrittenProblem]:
    """Yields the problems of a file's text; `name` is the file's name in messages."""
    block: list[tuple[str, str]] = []  # (place, line)
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("#"):
            continue
        if line.strip():
            block.append((f"{name}:{number}", line.strip()))
        elif block:
            yield _problem(block)
            block = []


def _problem(block: list[tuple[str, str]]) -> WrittenProblem:
    (place, head), *lines = block
    if not head.startswith("@ "):
        raise WrittenError(f"{place}: a problem begins with '@ ' and its steps, not {head[:40]!r}")
    if not 1 <= len(lines) <= MAX_WORDINGS:
        raise WrittenError(
            f"{place}: {len(lines)} wordings; 1 to {MAX_WORDINGS} follow the steps, and a blank "
            "line ends a problem"
        )
    steps, _, ranges = head[2:].partition("|")
    problem = WrittenProblem(
        place=place,
        key=f"{steps.strip()}|{lines[0][1]}",
        steps=_steps(place, steps),
        ranges=_ranges(place, ranges),
        wordings=tuple(_wording(*line) for line in lines),
    )
    if stray := problem.ranges.keys() - {slot for w in problem.wordings for slot in w.slots}:
        raise WrittenError(f"{place}: no wording shows {', '.join(sorted(stray))} of the ranges")
    for (at, _), wording in zip(lines, problem.wordings, strict=True):
        if missing := problem.variables - _always(wording.parts):
            raise WrittenError(f"{at}: the wording does not show {', '.join(sorted(missing))}")
    return problem


def _steps(place: str, text: str) -> Steps:
    steps: list[tuple[str, Operand, Operand]] = []
    for part in text.split(";"):
        match = _STEP.fullmatch(part)
        if match is None:
            raise WrittenError(f"{place}: {part.strip()!r} is no step such as a*b or r1-12")
        x, op, y = match.groups()
        for operand in (x, y):
            if operand[0] == "r" and int(operand[1]) > len(steps):
                raise WrittenError(f"{place}: {operand} stands before that step")
        steps.append((op, _operand(x), _operand(y)))
    if len(steps) > MAX_STEPS:
        raise WrittenError(f"{place}: {len(steps)} steps, at most {MAX_STEPS}")
    return _shared(tuple(steps))


def _operand(text: str) -> Operand:
    return int(text) if text.isdigit() else text


def _ranges(place: str, text: str) -> dict[str, tuple[int, int]]:
    ranges: dict[str, tuple[int, int]] = {}
    for part in filter(str.strip, text.split(",")):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2]) > int(match[3]):
            raise WrittenError(f"{place}: {part.strip()!r} is no range such as a 2-9")
        ranges[match[1]] = (int(match[2]), int(match[3]))
    return ranges


def _wording(place: str, text: str) -> Wording:
    if "?" not in text and not re.search(r"(?i)\b(find|calculate|work out|tell|give)\b", text):
        raise WrittenError(f"{place}: the wording asks nothing")
    slots: set[str] = set()
    return Wording(parts=_parts(place, text, slots), slots=_shared(frozenset(slots)))


@functools.cache
def _shared(value: Value) -> Value:
    """Returns the first of equal values: the files hold few different ones, many times each."""
    return value


def _always(parts: Parts) -> frozenset[str]:
    """Returns the slots that a text shows whatever its choices are."""
    shown = frozenset(part[1:-1] for part in parts if isinstance(part, str) and part[0] == "{")
    for part in parts:
        if not isinstance(part, str):
            shown |= frozenset.intersection(*map(_always, part))
    return shown


def _parts(place: str, text: str, slots: set[str]) -> Parts:
    """Returns the parts of a text, and adds its slots to `slots`."""
    parts: list[str | tuple[Parts, ...]] = []
    for part in filter(None, _PART.split(text)):
        if part[0] == "{" and part[-1] == "}":
            name = part[1:-1]
            if not _SLOT.fullmatch(name):
                raise WrittenError(f"{place}: {part} is no number, person or thing")
            slots.add(name)
            parts.append(sys.intern(part))
        elif part[0] == "[" and part[-1] == "]":
            options = part[1:-1].split("|")
            if len(options) < 2:
                raise WrittenError(f"{place}: {part} has no alternative")
            parts.append(tuple(_parts(place, option, slots) for option in options))
        elif set(part) & set("{}[]"):
            raise WrittenError(f"{place}: a bracket of {part.strip()[:40]!r} has no partner")
        else:
            parts.append(sys.intern(part))
    return tuple(parts)
