"""Options of a request as numbers in a row of arrays."""

from __future__ import annotations

import numpy as np

from jdllm.scheduler import request as request_lib

# End tokens that a row can stop at on the device; of more, the host finds the rest.
MAX_END_IDS = 8
NO_ID = -1  # in place of an end token


def fill_end_ids(place: np.ndarray, request: request_lib.Request) -> None:
    """Writes the request's first end tokens into `place`, int32 [MAX_END_IDS] of `NO_ID`."""
    ends = request.end_token_ids[: len(place)]
    place[: len(ends)] = ends


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the high and the low half of a 64-bit seed."""
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
