"""Lines of the log that say how images share steps: `--enable-batching-metrics`, as in SGLang.

A dispatch is here one denoising step. It is merged if it has several images, and full if it has as
many as a step of its size may have. What kept other rows out of it that were ready for a step is
counted by the option in which they differ.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence

from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image.stay import image_of

logger = logging.getLogger(__name__)

DISPATCHES_PER_LINE = 5
MOST_REASONS = 3


class BatchingLog:
    """Counts steps, and writes a line after every few."""

    def __init__(self) -> None:
        self._clear()

    def note(
        self,
        members: Sequence[Request],
        sharing: Sequence[Request],
        ready: Sequence[Request],
        *,
        most: int,
        bound: str,
        waits_s: Sequence[float],
    ) -> None:
        """Counts a step of `members`; the others of `ready` could have taken one, too.

        Those of its group who are not `sharing` have captions of another length. Such a step has at
        most `most` images, because of `bound`: "max_size", "config_cap:N" or "dynamic_disabled".
        `waits_s` says for each image that begins how long it has waited.
        """
        self._sizes.append(len(members))
        self._places += most
        self._num_full += len(members) == most
        self._waits_s += waits_s
        self._stops[bound if len(members) == most else "ready"] += 1
        first = members[0]
        chosen, alike = set(map(id, members)), set(map(id, sharing))
        for one in ready:
            if id(one) not in chosen:
                reason = bound if id(one) in alike else "prompt_length"
                self._rejected[_difference(first, one) or reason] += 1
        if len(self._sizes) == DISPATCHES_PER_LINE:
            self._write()
            self._clear()

    def _write(self) -> None:
        count, images = len(self._sizes), sum(self._sizes)
        waits = sorted(self._waits_s) or [0.0]
        logger.info(
            "Batching. #dispatch: %d, avg requests: %.2f, avg outputs: %.2f, merged: %.0f %%, "
            "full: %.0f %%, utilization: %.0f %%, wait avg: %.1f ms, wait p95: %.1f ms, stop: %s, "
            "rejected: %s",
            count,
            images / count,
            images / count,
            100 * sum(size > 1 for size in self._sizes) / count,
            100 * self._num_full / count,
            100 * images / self._places,
            1000 * sum(waits) / len(waits),
            1000 * waits[int(0.95 * (len(waits) - 1) + 0.5)],
            _top(self._stops),
            _top(self._rejected),
        )

    def _clear(self) -> None:
        self._sizes: list[int] = []
        self._places = 0
        self._num_full = 0
        self._waits_s: list[float] = []
        self._stops: collections.Counter[str] = collections.Counter()
        self._rejected: collections.Counter[str] = collections.Counter()


def _difference(first: Request, other: Request) -> str | None:
    """Returns the option that keeps a request out of the steps of another; None if none does."""
    one, two = image_of(first), image_of(other)
    if one.height != two.height:
        return "sampling_params.height"
    if one.width != two.width:
        return "sampling_params.width"
    if one.is_guided != two.is_guided:
        return "sampling_params.guidance_scale"
    is_cached, is_other = (image.residual_diff_threshold > 0 for image in (one, two))
    return "sampling_params.residual_diff_threshold" if is_cached != is_other else None


def _top(counts: collections.Counter[str]) -> str:
    """Returns the most frequent reasons with their numbers."""
    return ", ".join(f"{name} {n}" for name, n in counts.most_common(MOST_REASONS)) or "none"
