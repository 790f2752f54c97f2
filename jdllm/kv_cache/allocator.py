"""Hands out pages of the KV pool by number; the host's only record of which are taken.

A page taken is owned by exactly one request or by the prefix cache. Whoever owns
it frees it once; freeing a page that nobody holds is a bug and raises, because
two owners of one page corrupt each other's K,V without any other sign.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class OutOfPages(RuntimeError):
    """Says that fewer pages are free than were asked for; nothing was allocated."""


class PageAllocator:
    """Free list over pages 0 .. num_pages - 1; `is_used` is readable by anyone.

    Rows that keep no K,V have `num_pages` 0.
    """

    def __init__(self, num_pages: int):
        if num_pages < 0:
            raise ValueError(f"{num_pages=} must not be negative")
        self.num_pages = num_pages
        self.is_used = np.zeros(num_pages, dtype=bool)
        # Popped from the end, so low page numbers go out first.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` distinct pages, all of them or none."""
        if count < 0:
            raise ValueError(f"{count=} must not be negative")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self.is_used[pages] = True
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back; a page that is not taken, or given twice, raises and frees nothing."""
        pages = list(pages)
        if len(set(pages)) != len(pages):
            raise ValueError(f"{pages=} names a page twice")
        for page in pages:
            if not 0 <= page < self.num_pages or not self.is_used[page]:
                raise ValueError(f"{page=} is not an allocated page of {self.num_pages}")
        self.is_used[pages] = False
        self._free.extend(pages)
