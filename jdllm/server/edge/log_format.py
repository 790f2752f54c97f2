"""How a log line is written: nothing that a client sends can look like a line of its own.

Control characters, line breaks of all kinds, terminal escapes and marks that turn the direction
of text are written as escapes, and long lines are cut. A traceback keeps its lines, each behind a
bar: whatever an exception's message says, its lines do not begin like a record.
"""

from __future__ import annotations

import copy
import json
import logging
import numbers
import re
import unicodedata
from collections.abc import Mapping

FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
MAX_MESSAGE = 8192
MAX_TRACE_LINE = 2048
MAX_TRACE_LINES = 200
MAX_WORD = 256
TRACE_PREFIX = "    | "

# Cc: control, Cf: format (bidirectional marks), Zl and Zp: line breaks, Cs: halves of pairs.
UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SUSPECT = re.compile(r"[^\x20-\x7e]")
_WORD = re.compile(r"[\w.:/@+=~-]+", re.ASCII)


def escaped(text: str, limit: int = MAX_MESSAGE) -> str:
    """Returns `text` in one line of visible characters, cut after `limit` characters."""
    rest = len(text) - limit
    shown = _SUSPECT.sub(_escape, text[:limit])
    return shown if rest <= 0 else f"{shown}… [{rest} more characters]"


def word(text: str, limit: int = MAX_WORD) -> str:
    """Returns a client's text as one field of a line: as it is, or as a quoted JSON string."""
    if len(text) <= limit and _WORD.fullmatch(text):
        return text
    quoted = json.dumps(text[:limit], ensure_ascii=False)
    return escaped(quoted, limit=len(quoted)) + ("…" if len(text) > limit else "")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


class EscapingFormatter(logging.Formatter):
    """Formats a record as one line, and a traceback as lines behind a bar.

    A message may have line breaks only where the code that logs wrote them: in the format, and not
    in one of its arguments.
    """

    def __init__(self) -> None:
        super().__init__(FORMAT, DATE_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        own = copy.copy(record)
        own.msg, own.args = _message(record), None
        own.exc_text = None  # else the text of another handler's formatter would be taken
        return super().format(own)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802
        return _behind_bar(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _behind_bar(super().formatStack(stack_info))


def install() -> None:
    """Makes every handler of the process write escaped lines, those of libraries included."""
    formatter = EscapingFormatter()
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in named if isinstance(one, logging.Logger))]
    for logger in loggers:
        for handler in logger.handlers:
            handler.setFormatter(formatter)


class _Escaped:
    """Stands for an argument of a message, and is written in one line of visible characters."""

    def __init__(self, value: object):
        self._value = value

    def __str__(self) -> str:
        return escaped(str(self._value))

    def __repr__(self) -> str:
        return escaped(repr(self._value))


def _message(record: logging.LogRecord) -> str:
    form, args = str(record.msg), record.args
    if not args:
        return escaped(form)
    if isinstance(args, Mapping):
        text = form % {name: _argument(value) for name, value in args.items()}
    else:
        text = form % tuple(_argument(value) for value in args)
    return "\n".join(escaped(line) for line in text.split("\n"))


def _argument(value: object) -> object:
    return value if isinstance(value, numbers.Number) else _Escaped(value)


def _behind_bar(text: str) -> str:
    lines = text.split("\n")
    if len(lines) > MAX_TRACE_LINES:
        half = MAX_TRACE_LINES // 2
        note = f"[{len(lines) - 2 * half} more lines]"
        lines = [*lines[:half], note, *lines[-half:]]
    return "\n".join(TRACE_PREFIX + escaped(line, MAX_TRACE_LINE) for line in lines)
