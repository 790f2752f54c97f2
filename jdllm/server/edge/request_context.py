"""What code deep in a request needs to know about it: who asks, and the request's `x-request-id`.

Both are context variables: tasks that serve the request inherit them. The middleware sets them at
the beginning of every request.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
import uuid

# Safe in a header and in a log line, where it stands without quotes.
VALID_REQUEST_ID = re.compile(r"[\w.:/+=@~|-]{1,128}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `name` tells keys apart and reveals none of them."""

    name: str
    is_admin: bool = False


ANONYMOUS = Caller("no key")

CALLER: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=ANONYMOUS)
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")


def request_id_from(header: str | None) -> str:
    """Returns the id that a client sent if it is valid, else a new one."""
    if header is not None and VALID_REQUEST_ID.fullmatch(header):
        return header
    return uuid.uuid4().hex
