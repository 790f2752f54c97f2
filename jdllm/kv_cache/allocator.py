"""Hands out pages of the KV pool by number; the host's only record of which pages are taken.

Exactly one request or the prefix cache owns a taken page, and the owner frees it once.
Freeing a page that nobody owns is a bug and raises, because two owners of one page would
corrupt each other's K,V without any other sign.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool


class OutOfPages(RuntimeError):
    """Raised when fewer pages are free than requested; nothing was allocated."""


class PageAllocator:
    """Free list over pages 0 .. num_pages - 1; `is_used` is readable by anyone.

    Rows that keep no K,V have `num_pages` 0.
    """

    is_used: Bool[np.ndarray, " P"]

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
        """Returns `count` distinct pages; raises `OutOfPages` if fewer are free."""
        if count < 0:
            raise ValueError(f"{count=} must not be negative")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self.is_used[pages] = True
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back; if a page is not taken, or given twice, raises and frees nothing."""
        pages = list(pages)
        if len(set(pages)) != len(pages):
            raise ValueError(f"{pages=} names a page twice")
        for page in pages:
            if not 0 <= page < self.num_pages or not self.is_used[page]:
                raise ValueError(f"{page=} is not an allocated page of {self.num_pages}")
        self.is_used[pages] = False
        self._free.extend(pages)
