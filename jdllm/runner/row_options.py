"""Writes options of a request as numbers into its row of the input arrays."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from jdllm.scheduler.request import Request

# A row stops on the device at this many end tokens; the host finds any others.
MAX_END_IDS = 8
NO_ID = -1  # where there is no end token


def fill_end_ids(out: Int32[np.ndarray, " E"], request: Request) -> None:
    """Writes the request's first end tokens into `out`, which holds `MAX_END_IDS` times `NO_ID`."""
    ends = request.end_token_ids[: len(out)]
    out[: len(ends)] = ends


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the high and the low 32 bits of a 64-bit seed."""
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
