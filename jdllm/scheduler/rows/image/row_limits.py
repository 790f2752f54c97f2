"""How many rows launches of a shape may have after one of them found too little memory.

The first time, the shape gets half as many rows; if that is still too much, one. Memory may be free
again later: another process has ended, or a smaller model runs beside. So after many good launches
the shape gets the next larger size, on trial. A trial that fails costs all running rows their
progress, so the next one comes after many times as many good launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows.image import buckets

# Good launches before a larger one is tried: at first, times so much after each further fault, and
# at most. A fault costs about as much as the steps that running rows have behind them (a few dozen
# launches), so trials cost a few percent at first, and soon nothing that shows.
FIRST_PATIENCE, PATIENCE_FACTOR, MOST_PATIENCE = 128, 4, 32768


@dataclasses.dataclass(slots=True)
class _Limit:
    """The most rows of a shape; they grow after `patience` good launches with as many rows.

    `good_rows` are those before they grew, None if they have not grown since the last fault.
    """

    most: int
    patience: int
    num_good: int = 0
    good_rows: int | None = None

    def fail(self, rows: int) -> None:
        """Notes that a launch of `rows` rows did not fit, not for the first time."""
        if self.good_rows is None:
            self.most = 1
        else:
            self.most = self.good_rows if rows > self.good_rows else rows // 2
        self.patience = min(PATIENCE_FACTOR * self.patience, MOST_PATIENCE)
        self.num_good, self.good_rows = 0, None


class RowLimits:
    """Lowers the rows of launches of a shape for which memory did not suffice, and raises them."""

    def __init__(self, first_patience: int = FIRST_PATIENCE):
        self._first_patience = first_patience
        self._limits: dict[Bucket, _Limit] = {}  # by the shape of one row

    def allowed(self, shape: Bucket, ladder: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of `ladder` that launches of a shape may have."""
        limit = self._limits.get(_of_one_row(shape))
        return buckets.up_to(ladder, ladder[-1] if limit is None else limit.most)

    def halve(self, bucket: Bucket) -> bool:
        """Notes that a launch did not fit; returns False if smaller launches are impossible."""
        if bucket.rows == 1:
            return False
        shape = _of_one_row(bucket)
        if shape in self._limits:
            self._limits[shape].fail(bucket.rows)
        else:
            self._limits[shape] = _Limit(most=bucket.rows // 2, patience=self._first_patience)
        return True

    def note_good(self, bucket: Bucket, sizes: Callable[[Bucket], Sequence[int]]) -> bool:
        """Notes a launch that fitted; returns whether its shape may have more rows from now on.

        `sizes` gives the ladder of a shape.
        """
        shape = _of_one_row(bucket)
        limit = self._limits.get(shape)
        if limit is None:
            return False
        ladder = sizes(bucket)
        allowed = self.allowed(shape, ladder)
        if bucket.rows < allowed[-1]:
            return False  # a smaller launch says nothing
        limit.num_good += 1
        if limit.num_good < limit.patience:
            return False
        if allowed[-1] == ladder[-1]:
            del self._limits[shape]  # as if there had been no fault
            return False
        limit.good_rows, limit.most = allowed[-1], ladder[len(allowed)]
        limit.num_good = 0
        return True


def _of_one_row(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, rows=1, tokens=0)
