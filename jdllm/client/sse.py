"""Server-sent events as the model servers use them: one JSON object a `data:` line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

At = TypeVar("At")

DONE = b"[DONE]"


def payloads(chunks: Iterable[tuple[At, bytes]]) -> Iterator[tuple[At, bytes]]:
    """Yields the content of each `data:` line, with the mark of the chunk that completed it.

    Chunks may end anywhere. Lines that carry no data (comments, names, keep-alive) are left out.
    """
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line.removeprefix(b"data:").strip()
