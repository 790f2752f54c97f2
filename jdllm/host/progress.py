"""Progress bars: live in a terminal or a notebook, a line now and then in a log.

All progress of the package goes through `bar`. Where stderr is no terminal, a bar that is drawn
anew for every item would fill the log; there a line is written every 30 s, and one at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import tqdm.asyncio
import tqdm.auto

LINE_INTERVAL_S = 30.0


def bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    initial: int = 0,
    desc: str | None = None,
    unit: str = "it",
    is_shown: bool = True,
) -> tqdm.std.tqdm:
    """Returns a progress bar over `items`, or one that `update` moves."""
    is_live = _is_live()
    kind = tqdm.auto.tqdm if is_live else _Lines
    return kind(
        items,
        total=total,
        initial=initial,
        desc=desc,
        unit=unit,
        disable=not is_shown,
        # In a log each update looks at the clock: one that guesses may guess hours.
        miniters=None if is_live else 1,
    )


def _is_live() -> bool:
    # In a notebook stderr is no terminal, but `tqdm.auto` has chosen a class with widgets.
    return sys.stderr.isatty() or tqdm.auto.tqdm is not tqdm.asyncio.tqdm_asyncio


class _Lines(tqdm.std.tqdm):
    """Writes whole lines, at most one per interval, and the last state at the end."""

    _shown_s: float | None = None

    def display(self, *_: Any, **__: Any) -> bool:
        # `close` disables the bar before it displays it, and then writes the end of the line.
        is_last, now = self.disable, time.monotonic()
        if self._shown_s is None:
            self._shown_s = now  # no line at the beginning
        if is_last or now - self._shown_s >= LINE_INTERVAL_S:
            self._shown_s = now
            self.fp.write(str(self) + ("" if is_last else "\n"))
            self.fp.flush()
        return True
