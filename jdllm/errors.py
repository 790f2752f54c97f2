"""Errors a person can cause, with what the HTTP edge needs to answer them.

Every layer of the engine raises these instead of a bare `ValueError` if a request is at fault.
The server maps `status`, `param` and `code` to an OpenAI error body; the offline API passes the
errors on as they are.
"""

from __future__ import annotations

import difflib
import itertools
import numbers
from collections.abc import Iterable, Mapping

QUOTED_CHARACTERS = 80
QUOTED_ITEMS = 3
QUOTED_DEPTH = 2
QUOTED_BITS = 256
# A bound for what is not quoted by `quote`, such as lists of known names.
MESSAGE_CHARACTERS = 4000
NAME_CHARACTERS = 80
HINT_CHARACTERS = 200
LEAST_LIKENESS = 0.75  # of difflib: one or two letters of ten differ


class RequestError(ValueError):
    """Says that one request cannot be served; never affects another request.

    `param` names the field at fault. Names come from requests too, so both texts are cut.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(_cut(message, MESSAGE_CHARACTERS))
        self.param = None if param is None else _cut(param, NAME_CHARACTERS)
        self.code = code


class RequestTooLong(RequestError):
    """Says that prompt and wanted tokens exceed the context or the KV pool."""


class QueueFull(RequestError):
    """Says that the waiting queue is at its limit; the client should retry."""

    status = 503
    retry_after_s = 1


class EngineStopped(RequestError):
    """Says that the engine is draining or has shut down."""

    status = 503
    retry_after_s = 5


class ReplicaLost(RequestError):
    """Says that the replica that ran a request is gone; the client should ask again."""

    status = 503
    retry_after_s = 1


class ConfigError(ValueError):
    """Says that a start-up option, config file or checkpoint is wrong."""


def maximum_context(limit: int) -> str:
    """Returns how every message about too long a request begins.

    The words are OpenAI's; clients such as litellm know by them that a larger model may do.
    """
    return f"This model's maximum context length is {limit} tokens"


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns a hint such as `; did you mean 'threshold'?`, or the known names.

    `known` must be names that are served. A hint is at most a line: many names are not listed.
    """
    known = sorted(known)
    close = near(name, known)
    hint = f"; did you mean {close!r}?" if close else f"; known: {', '.join(known)}"
    return hint if len(hint) <= HINT_CHARACTERS else ""


def near(name: object, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` is a misspelling of, None if there is none."""
    if not isinstance(name, str) or len(name) > NAME_CHARACTERS:
        return None
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=LEAST_LIKENESS)
    return close[0] if close else None


def described_choices(num_choices: int, num_prompts: int) -> str:
    """Returns what a request asks for, as the errors about too many choices call it."""
    if num_prompts == 1:
        return f"n={quote(num_choices)}"
    return f"a list of {num_prompts} prompts with {quote(num_choices)} choices"


def quote(value: object) -> str:
    """Returns `value` as Python writes it, cut to a part of a line.

    The time is bounded too, whatever the size of `value`, its depth and its number of digits.
    """
    return _cut(_shown(value, QUOTED_DEPTH), QUOTED_CHARACTERS)


def _shown(value: object, depth: int) -> str:
    """Returns the beginning of `repr(value)`, with containers up to a depth."""
    match value:
        case str() | bytes():
            return repr(value[:QUOTED_CHARACTERS])
        case int() if value.bit_length() > QUOTED_BITS:
            return f"<an integer of {value.bit_length()} bits>"
        case None | numbers.Number():
            return repr(value)
        case Mapping():
            pairs = itertools.islice(value.items(), QUOTED_ITEMS if depth else 0)
            shown = [f"{_shown(key, 0)}: {_shown(item, depth - 1)}" for key, item in pairs]
            brackets = "{}"
        case list() | tuple():
            shown = [_shown(item, depth - 1) for item in value[: QUOTED_ITEMS if depth else 0]]
            brackets = "[]" if isinstance(value, list) else "()"
        case _:
            return f"<{type(value).__name__}>"
    if len(shown) < len(value):
        shown.append("...")
    return f"{', '.join(shown)}".join(brackets)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."
