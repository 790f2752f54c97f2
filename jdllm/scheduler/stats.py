"""Statistics of the scheduler."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot; the three totals count from the start.

    Running requests hold `num_used_pages`; the prefix cache holds `num_cached_pages`. A page
    that both hold counts in both.
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
