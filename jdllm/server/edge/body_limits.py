"""What a JSON body may hold, counted in its bytes before anything is built from it.

A parsed value takes many times the memory of its text: a body of 8 MB made of empty lists would
become 250 MB. No request of a client comes near these limits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jdllm import errors

MAX_DEPTH = 64
MAX_CONTAINERS = 32_768  # objects and arrays: messages, their parts, prompts of ids, schemas
MAX_STRINGS = 262_144  # keys included
MAX_VALUES = 2_097_152  # of which most can be token ids only

CHUNK_BYTES = 1 << 20


def check(body: bytes) -> None:
    """Raises a `RequestError` for a body with too many values, or too deeply nested ones.

    What it makes of text that is not JSON means nothing; the parser refuses that.
    """
    # Too many by any count, as characters inside of strings count here. Few bodies go on.
    if (
        body.count(b"[") + body.count(b"{") <= min(MAX_DEPTH, MAX_CONTAINERS)
        and body.count(b'"') <= 2 * MAX_STRINGS
        and body.count(b",") <= MAX_VALUES
    ):
        return
    depth = num_containers = num_quotes = num_values = 0
    for outside, quotes in _outside_strings(body):
        steps = np.zeros(len(outside), np.int8)
        steps[(outside == ord("[")) | (outside == ord("{"))] = 1
        num_containers += int(np.count_nonzero(steps))
        steps[(outside == ord("]")) | (outside == ord("}"))] = -1
        depths = depth + np.cumsum(steps, dtype=np.int32)
        num_values += int(np.count_nonzero(outside == ord(",")))
        num_quotes += quotes
        for count, limit, what in (
            (int(depths.max(initial=0)), MAX_DEPTH, "levels of lists and objects"),
            (num_containers, MAX_CONTAINERS, "lists and objects"),
            (num_quotes // 2, MAX_STRINGS, "strings"),
            (num_values, MAX_VALUES, "values"),
        ):
            if count > limit:
                raise errors.RequestError(f"the body has more than {limit:,} {what}")
        depth = int(depths[-1]) if len(depths) else depth


def _outside_strings(body: bytes) -> Iterator[tuple[np.ndarray, int]]:
    """Yields, chunk by chunk, the characters outside of strings and the number of quotes."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_inside = False
    for start in range(0, len(body), CHUNK_BYTES):
        size = min(CHUNK_BYTES, len(body) - start)
        chunk = np.frombuffer(body, np.uint8, count=size, offset=start)
        is_quote = chunk == ord('"')
        inside = np.logical_xor.accumulate(is_quote) ^ is_inside
        is_inside = bool(inside[-1])
        yield chunk[~inside & ~is_quote], int(np.count_nonzero(is_quote))
