"""The order in which waiting requests are admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from jdllm.scheduler import request as request_lib

Policy = Literal["fcfs", "lpm"]

# Matching a prefix costs time for each waiting request in each round. Requests of the queue beyond
# this number stay in order of arrival.
MAX_MATCHED_REQUESTS = 128


def admission_order(
    waiting: Sequence[request_lib.Request],
    policy: Policy,
    cached_prefix_len: Callable[[request_lib.Request], int],
) -> list[request_lib.Request]:
    """Returns `waiting` (in order of arrival) in order of admission.

    Preempted requests come first under every policy, because a user already waits for
    their next tokens. `lpm` then takes the longest cached prefix first, and equal ones by
    arrival.
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
