"""One evaluation example and the score of one output; all tasks share them."""

from __future__ import annotations

import dataclasses
import re

# GSM8K's own pattern of a number, but it does not match a full stop at the end.
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
AFTER_MARK = re.compile(r"####\s*(-?\$?\d[\d,]*(?:\.\d+)?)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its gold answer as text; few-shot prompts show the solution, `answer`.

    The gold answer of a code task is the tests that a program must pass.
    """

    id: str
    question: str
    gold: str
    answer: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`predicted` is None, and `is_invalid` true, when the output holds no answer.

    For a code task `predicted` says how the program ended.
    """

    is_correct: bool
    is_invalid: bool
    predicted: str | None


def extract_answer(text: str) -> str | None:
    """Returns the number after the first `####`, else the last number, without commas and $."""
    marked = AFTER_MARK.search(text)
    found = marked.group(1) if marked else next(reversed(NUMBER.findall(text)), None)
    return None if found is None else found.replace(",", "").replace("$", "")


def score(output: str, gold: str) -> Score:
    """Compares an output's number with the gold one by value."""
    predicted = extract_answer(output)
    is_correct = predicted is not None and float(predicted) == float(gold.replace(",", ""))
    return Score(is_correct=is_correct, is_invalid=predicted is None, predicted=predicted)
