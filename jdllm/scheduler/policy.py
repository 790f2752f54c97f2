"""In which order waiting requests are admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from jdllm.scheduler import request as request_lib

Policy = Literal["fcfs", "lpm"]

# Matching a prefix costs time per waiting request and round; beyond this many the
# rest of the queue stays in order of arrival.
MAX_MATCHED_REQUESTS = 128


def admission_order(
    waiting: Sequence[request_lib.Request],
    policy: Policy,
    cached_prefix_len: Callable[[request_lib.Request], int],
) -> list[request_lib.Request]:
    """Returns `waiting` (given by arrival) in order of admission.

    Preempted requests come first under every policy: their tokens are being waited
    for. `lpm` then takes the longest cached prefix first, equals by arrival.
    """
    preempted = [request for request in waiting if request.num_preemptions]
    fresh = [request for request in waiting if not request.num_preemptions]
    match policy:
        case "fcfs":
            return preempted + fresh
        case "lpm":
            head, tail = fresh[:MAX_MATCHED_REQUESTS], fresh[MAX_MATCHED_REQUESTS:]
            head.sort(key=cached_prefix_len, reverse=True)
            return preempted + head + tail
