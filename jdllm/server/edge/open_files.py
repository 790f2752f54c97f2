"""How many connections a server holds, so that it never runs out of open files.

Every connection is an open file. A process at its limit accepts none, not even a probe of its
health, and asyncio then writes thousands of tracebacks a second. Anybody can open connections
without a key, so the limit is raised as far as a process may, and connections stay below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource

WANTED_FILES = 1 << 16
# Weights, libraries, devices, the log: what else a server has open.
MAX_SPARE_FILES = 256
MAX_ACCEPTED_AT_ONCE = 64
# asyncio goes on accepting for some rounds until the first connection too many is closed.
ROUNDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be, and how many of them are accepted at a time."""

    max_connections: int
    accepted_at_once: int


def limits() -> Limits:
    """Raises the limit of open files and returns what it leaves for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    at_once = max(1, min(MAX_ACCEPTED_AT_ONCE, count // 32))
    spare = min(MAX_SPARE_FILES, count // 4) + ROUNDS * at_once
    return Limits(max_connections=max(1, count - spare), accepted_at_once=at_once)
