"""The host's index of the captions that the device keeps: which entry holds which embedding.

All entries have the same size. Running requests hold theirs, so that nobody writes them anew; the
others are a cache, and the one that has not been used for the longest time is given up first. A
caption is encoded once, also for requests that come while it still waits for its encoding.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jdllm import errors
from jdllm.scheduler.stay import Stay

Caption = tuple[int, ...]  # the tokens


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CaptionStay(Stay):
    """A stay that holds entries of the store: the caption's, and for guidance the negative one's.

    Two equal captions are one entry, which the stay holds twice.
    """

    entries: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class _Entry:
    caption: Caption
    num_holders: int = 0
    is_written: bool = False  # a launch that writes it has been planned


class CaptionStore:
    """`num_entries` entries, numbered from 0; the counters count captions of admitted requests."""

    def __init__(self, num_entries: int):
        if num_entries < 1:
            raise errors.ConfigError(f"{num_entries=} of the caption store must be at least 1")
        self.num_entries = num_entries
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._free = list(reversed(range(num_entries)))
        self._entries: dict[int, _Entry] = {}
        self._by_caption: dict[Caption, int] = {}
        # Written and without holders, the least recently used first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_held(self) -> int:
        """Entries that running requests hold."""
        return len(self._entries) - len(self._idle)

    @property
    def num_cached(self) -> int:
        """Entries that nobody holds, whose captions need no encoding."""
        return len(self._idle)

    def take(self, captions: Sequence[Caption]) -> tuple[int, ...] | None:
        """Holds an entry for each caption; returns None and changes nothing without room."""
        known = {self._by_caption[one] for one in captions if one in self._by_caption}
        missing = len({one for one in captions if one not in self._by_caption})
        if missing > len(self._free) + len(self._idle) - len(known & self._idle.keys()):
            return None
        for entry in known:  # first, so that nothing evicts them
            self._idle.pop(entry, None)
        return tuple(self._hold(one) for one in captions)

    def is_known(self, caption: Caption) -> bool:
        """Returns whether a launch that encodes the caption has been planned, and is still kept."""
        entry = self._by_caption.get(caption)
        return entry is not None and self.is_written(entry)

    def caption(self, entry: int) -> Caption:
        """Returns what an entry in use holds, or will hold."""
        return self._entries[entry].caption

    def is_written(self, entry: int) -> bool:
        """Returns whether a launch that encodes the entry's caption has been planned."""
        return self._entries[entry].is_written

    def note_written(self, entry: int) -> None:
        """Notes that a launch that encodes the entry's caption has been planned."""
        self._entries[entry].is_written = True

    def release(self, stay: Stay) -> None:
        """Takes back what a stay holds; a caption that was never encoded is forgotten."""
        assert isinstance(stay, CaptionStay)
        for number in stay.entries:
            entry = self._entries[number]
            entry.num_holders -= 1
            if entry.num_holders:
                continue
            self._idle[number] = None
            if not entry.is_written:
                self._forget(number)

    def flush(self) -> None:
        """Forgets every caption that nobody holds."""
        for number in list(self._idle):
            self._forget(number)

    def _hold(self, caption: Caption) -> int:
        number = self._by_caption.get(caption)
        if number is None:
            self.misses += 1
            if not self._free:
                self.evictions += 1
                self._forget(next(iter(self._idle)))
            number = self._by_caption[caption] = self._free.pop()
            self._entries[number] = _Entry(caption)
        else:
            self.hits += 1
        self._entries[number].num_holders += 1
        return number

    def _forget(self, number: int) -> None:
        del self._idle[number]
        del self._by_caption[self._entries.pop(number).caption]
        self._free.append(number)
