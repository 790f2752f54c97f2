"""The failures of a call of a server."""

from __future__ import annotations


class CallFailed(RuntimeError):
    """Says that a call of a server gave no usable answer; the subclasses say why."""


class NoConnection(CallFailed):
    """Says that there is no server, or that the connection to it was lost."""


class Refused(CallFailed):
    """Says that the server answered with a status that means failure."""

    def __init__(self, message: str, *, status: int, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class BadAnswer(CallFailed):
    """Says that an answer does not have the form of its route, or that it ends in an error."""
