"""Errors a person can cause, with what the HTTP edge needs to answer them.

Every layer of the engine raises these instead of a bare `ValueError` if a request is at fault.
The server maps `status`, `param` and `code` to an OpenAI error body; the offline API passes the
errors on as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """Says that one request cannot be served; never affects another request."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
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


class ConfigError(ValueError):
    """Says that a start-up option, config file or checkpoint is wrong."""


def maximum_context(limit: int) -> str:
    """Returns how every message about too long a request begins.

    The words are OpenAI's; clients such as litellm know by them that a larger model may do.
    """
    return f"This model's maximum context length is {limit} tokens"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as `; did you mean 'threshold'?`, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
