r"""Finds and compares final answers written in LaTeX, by the published rules of MATH.

Two answers are equal if their normal forms are equal by the rules of Hendrycks et al. (2021), or
by those of Lewkowycz et al. (2022, "Minerva", appendix D), or if both are the same number. No
algebra is done: x + 1 and 1 + x differ.
"""

from __future__ import annotations

import fractions
import re

_MARKS = (r"\boxed", r"\fbox")
_FINAL = re.compile(
    r"[Ff]inal [Aa]nswer(?: is)?:?\s*(?:The final answer is\s*)?(.+?)(?:\. I hope|\n|$)"
)

# Minerva: replaced in this order, then what is removed.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_WORDS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters",
    "meals", "edges", "students", "childrentickets", "multiples",
)  # fmt: skip
_REMOVED = (
    "\\ldots", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_MAX_DIGITS = 100  # of a number that is compared by value
_MAX_LENGTH = 2000  # of an answer that is rewritten: a model may repeat itself without end


def last_boxed(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` or `\fbox{...}` holds, None without one.

    `\boxed 5$` without braces ends at the dollar sign or with the line.
    """
    start = max(text.rfind(mark) for mark in _MARKS)
    if start < 0:
        return None
    mark = next(mark for mark in _MARKS if text.startswith(mark, start))
    rest = text[start + len(mark) :].lstrip(" ")
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip() or None
    depth = 0
    for i, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:i]
    return None  # cut off before its end


def final_answer(text: str) -> str | None:
    """Returns the last boxed answer, or else what follows the last "final answer is"."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    found = _FINAL.findall(text)
    return found[-1].strip().rstrip(".") if found else None


def are_equal(one: str, other: str) -> bool:
    """Returns whether two answers are the same by one of the rules."""
    if max(len(one), len(other)) > _MAX_LENGTH:
        return one == other
    return (
        hendrycks_form(one) == hendrycks_form(other)
        or minerva_form(one) == minerva_form(other)
        or _is_same_number(minerva_form(one), minerva_form(other))
    )


def hendrycks_form(answer: str) -> str:
    """Returns an answer without layout, units on its right, and shorthand fractions and roots."""
    text = answer.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = text.split("\\text{ ")[0]  # in MATH, "\text{ " begins a unit
    text = text.replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt(?=[^{\[])(.)", r"\\sqrt{\1}", text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return r"\frac{1}{2}"
    slash = re.fullmatch(r"(-?\d+)/(-?\d+)", text)
    return rf"\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def minerva_form(answer: str) -> str:
    """Returns the right side of an answer, as plain LaTeX without units and text."""
    text = answer.split("=")[-1]
    for word in _WORDS:
        text = re.sub(rf"(?<!\\)\b{word}\b", "", text)
    for before, after in _REPLACED:
        text = text.replace(before, after)
    # Commands stay whole: "ft" must not leave "\left" broken.
    pieces = re.split(r"(\\[a-zA-Z]+)", text)
    pieces[::2] = [_without(piece, _WORDS) for piece in pieces[::2]]
    text = _without("".join(pieces), _REMOVED)
    text = re.sub(r"(.*?)\$(.*?)\$(.*)", r"\2", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}", text)
    text = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", text).replace("$", "")
    is_grouped = re.fullmatch(r"-?\d{1,3}(,\d{3})+", text) is not None
    return text.replace(",", "") if is_grouped else text


def _without(text: str, removed: tuple[str, ...]) -> str:
    for expression in removed:
        text = text.replace(expression, "")
    return text


def _braced_fractions(text: str) -> str:
    r"""Turns \frac12, \frac1{2} and \frac{1}2 into \frac{1}{2}."""
    text = re.sub(r"\\frac([^{\\])", r"\\frac{\1}", text)
    return re.sub(r"\\frac\{([^{}]*)\}([^{\\])", r"\\frac{\1}{\2}", text)


def _is_same_number(one: str, other: str) -> bool:
    found = [_number(text) for text in (one, other)]
    return None not in found and found[0] == found[1]


def _number(text: str) -> fractions.Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    ratio = re.fullmatch(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}", text)
    if ratio is None:
        ratio = re.fullmatch(r"()(-?\d+)/(-?\d+)", text)
    if ratio is not None:
        if int(ratio[3]) == 0:
            return None
        return (-1 if ratio[1] else 1) * fractions.Fraction(int(ratio[2]), int(ratio[3]))
    return fractions.Fraction(text) if _NUMBER.fullmatch(text) else None
