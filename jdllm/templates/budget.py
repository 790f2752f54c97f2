"""What a chat template may spend: a budget of characters and steps, and a deadline.

A single operation of Python cannot be interrupted. The costs of operations whose result can be
larger than their input (`*`, padding, `replace`, `join`, `format` and so on) are therefore
estimated and charged before they run; the results of all others are charged after.
"""

# ruff: noqa: ARG001 (an estimate takes the arguments of the call that it estimates)

from __future__ import annotations

import contextlib
import contextvars
import itertools
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

BASE_UNITS = 2**24  # characters, or steps of 4 characters each
UNITS_PER_INPUT_CHARACTER = 64
STEP = 4
DEADLINE_S = 5.0
MAX_WIDTH = 10_000  # of one padded field
MAX_INTEGER_BITS = 2**16

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


class LimitExceeded(Exception):
    """Says that a template takes more time or memory than any prompt needs."""


class _Budget:
    def __init__(self, units: int):
        self.left = units
        self._end_s = time.monotonic() + DEADLINE_S

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise LimitExceeded("it makes too many steps or too much text")
        if time.monotonic() > self._end_s:
            raise LimitExceeded(f"it takes longer than {DEADLINE_S:g} s")


# Rendering is synchronous, so the budget of a render is that of its thread's context.
_current: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


@contextlib.contextmanager
def limits(inputs: Any) -> Iterator[None]:
    """Gives all templates that are compiled or rendered inside one budget.

    The budget grows with `inputs`: a long conversation may take longer.
    """
    size = text_size(inputs, 2**31)
    token = _current.set(_Budget(BASE_UNITS + UNITS_PER_INPUT_CHARACTER * size))
    try:
        yield
    finally:
        _current.reset(token)


def charge(units: int) -> None:
    """Takes `units` from the budget, or raises `LimitExceeded`."""
    _current.get().charge(units)


def charge_text(value: Any, *, times: int = 1, indent: int = 0) -> None:
    """Charges `times` the text of a value, before that text exists."""
    charge(times * text_size(value, _current.get().left, indent=indent))


def charge_size(result: Any) -> None:
    """Charges the memory of a result, without what its entries hold."""
    if isinstance(result, int):
        charge(result.bit_length() // 8)
    elif isinstance(result, Sized):
        charge(len(result))


def text_size(value: Any, limit: int, *, indent: int = 0) -> int:
    """Returns about how many characters `value` has as text, or a little more than `limit`.

    `indent` is the number of spaces before an entry for each level it is nested. The values may
    be nested to any depth.
    """
    total = 0
    waiting: list[Iterator[Any]] = [iter((value,))]
    while waiting and total <= limit:
        for entry in waiting[-1]:
            total += 2 + indent * (len(waiting) - 1)
            if isinstance(entry, str | bytes):
                total += len(entry)
            elif isinstance(entry, int):
                total += entry.bit_length() // 3
            elif isinstance(entry, Mapping):
                waiting.append(itertools.chain(entry, entry.values()))
                break
            elif isinstance(entry, list | tuple | set | frozenset):
                waiting.append(iter(entry))
                break
            else:
                total += 16
            if total > limit:
                break
        else:
            waiting.pop()
    return total


# Operators


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charges `left operator right`, of which the operator is +, *, ** or %."""
    charge(STEP)
    if isinstance(left, int) and isinstance(right, int):
        _check_integers(operator, left, right)
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
                charge(len(value) * max(count, 0))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        charge(len(left) + len(right))
    elif operator == "%" and isinstance(left, str | bytes):
        charge_percent(left, right)


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = 0
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**" and right > 0:
        bits = left.bit_length() * right
    if bits > MAX_INTEGER_BITS:
        raise LimitExceeded(f"an integer has more than {MAX_INTEGER_BITS} bits")


def charge_percent(pattern: Any, values: Any) -> None:
    """Charges `pattern % values`."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
    sizes = [size for match in _PERCENT.finditer(text) for size in match.groups("0")]
    charge(len(text) + sum(_width(size) for size in sizes))
    charge_text(values, times=max(1, text.count("%")))


def charge_format(pattern: str, arguments: Any, named: Any) -> None:
    """Charges `pattern.format(...)`."""
    fields = [field for field in string.Formatter().parse(pattern) if field[1] is not None]
    for _, _, spec, _ in fields:
        for size in re.findall(r"\d+|\{", spec or ""):
            charge(_width("*" if size == "{" else size))
    charge(len(pattern))
    charge_text([arguments, named], times=max(1, len(fields)))


def _width(text: str) -> int:
    """Returns the width that a format asks for; one from a variable (`*`) is refused."""
    if text == "*":
        raise LimitExceeded("a format takes its width from a variable")
    if len(text) > 9:
        raise LimitExceeded(f"a field is wider than {MAX_WIDTH}")
    return _bounded_width(int(text or 0))


def _bounded_width(width: Any) -> int:
    if not isinstance(width, int):
        return 0  # the operation itself refuses it
    if width > MAX_WIDTH:
        raise LimitExceeded(f"a field is wider than {MAX_WIDTH}")
    return max(width, 0)


# Methods and filters: name -> what charges a call with these arguments, the value first

Charge = Callable[..., None]


def _pad(value: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    charge(_bounded_width(width))


def _expand_tabs(value: Any, tabsize: Any = 8) -> None:
    charge(len(value) * (1 + _bounded_width(tabsize)))


def _replace(value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    charge_text(value)
    charge_text(new)
    if not isinstance(value, str | bytes):
        value, old, new = str(value), str(old), str(new)
    charge(value.count(old) * len(new))  # as all occurrences: an upper bound


def _join(separator: Any, values: Any) -> None:
    charge_text(values)
    charge(len(values) * len(separator))


def _translate(value: Any, table: Any) -> None:
    entries = table.values() if isinstance(table, Mapping) else ()
    longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=1)
    charge(len(value) * longest)


METHODS: Mapping[str, Charge] = {
    "center": _pad,
    "ljust": _pad,
    "rjust": _pad,
    "zfill": _pad,
    "to_bytes": _pad,
    "expandtabs": _expand_tabs,
    "replace": _replace,
    "join": _join,
    "translate": _translate,
}


def _join_filter(value: Any, d: Any = "", attribute: Any = None) -> None:
    _join(str(d), value)


def _indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    charge_text(value)
    size = len(width) if isinstance(width, str) else _bounded_width(width)
    charge((1 + len(str(value).splitlines())) * size)


def _wrap_words(
    value: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = "\n", *_: Any
) -> None:
    charge_text(value, times=1 + len(wrapstring or "\n"))


def _truncate(
    value: Any, length: Any = 255, killwords: Any = False, end: Any = "...", *_: Any
) -> None:
    charge_text(value)
    charge_text(end)


def _split(value: Any, count: Any, fill_with: Any = None) -> None:
    charge(_bounded_width(count))


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *_: Any,
    **__: Any,
) -> None:  # fmt: skip
    between = sum(len(each) for each in separators or () if isinstance(each, str))
    width = len(indent) if isinstance(indent, str) else _bounded_width(indent)
    charge_text(value, times=6 if ensure_ascii else 1, indent=width + between)


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):  # lists are added in quadratic time
        raise LimitExceeded("sum is for numbers")


def _round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > 1000:  # 10 ** precision is computed
        raise LimitExceeded("round has a precision of more than 1000 digits")


def _no_growth(value: Any, *_: Any, **__: Any) -> None:
    """For filters that make at most what they are given, and no text of it."""


FILTERS: Mapping[str, Charge] = {
    "batch": _split,
    "center": _pad,
    "format": lambda value, *values, **named: charge_percent(value, [values, named]),
    "indent": _indent,
    "join": _join_filter,
    "replace": _replace,
    "round": _round,
    "slice": _split,
    "sum": _sum,
    "tojson": _to_json,
    "truncate": _truncate,
    "wordwrap": _wrap_words,
    **dict.fromkeys(
        (
            "abs", "attr", "count", "d", "default", "dictsort", "filesizeformat", "first", "float",
            "groupby", "int", "items", "last", "length", "list", "map", "max", "min", "reject",
            "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
        ),
        _no_growth,
    ),
}  # fmt: skip


def charge_filter(name: str, value: Any, *arguments: Any, **named: Any) -> None:
    """Charges a call of a filter; those not in `FILTERS` make text of their value."""
    charge(STEP)
    estimate = FILTERS.get(name)
    if estimate is None:
        charge_text(value, times=6)  # `escape` writes up to 6 characters for one
    else:
        estimate(value, *arguments, **named)
