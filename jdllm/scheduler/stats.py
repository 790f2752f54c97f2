"""What the scheduler tells about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot; the three totals count from the start.

    `num_used_pages` are held by running requests; `num_cached_pages` are in the tree
    and may be counted in both.
    """

    num_running: int
    num_queued: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    token_usage: float
    total_prompt_tokens: int
    total_cached_tokens: int
    total_preemptions: int
