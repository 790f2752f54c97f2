"""Server-sent events as the model servers use them: one JSON object per `data:` line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

At = TypeVar("At")

DONE = b"[DONE]"


def payloads(chunks: Iterable[tuple[At, bytes]]) -> Iterator[tuple[At, bytes]]:
    """Yields the content of each `data:` line, with the time of the chunk that completed it.

    Chunks may end anywhere. Lines without data (comments, names, keep-alive) are left out.
    """
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line.removeprefix(b"data:").strip()
