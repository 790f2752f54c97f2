"""Text embeddings of the prompts that were encoded last, bounded in bytes.

A prompt is encoded once, however many images it gets. The cache lives on the host and does not
look into what it holds.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a cache holds now, and what has happened since its start.

    `evicted` counts entries that made room for others.
    """

    entries: int
    num_bytes: int
    hits: int
    misses: int
    evicted: int


class EmbeddingCache(Generic[Value]):
    """A map from the ids of a prompt to its embedding; the least recently used entry goes first.

    Every method may be called from any thread.
    """

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise ValueError(f"{max_bytes=} must be at least 0")
        self.max_bytes = max_bytes
        self._entries: collections.OrderedDict[tuple[int, ...], tuple[Value, int]]
        self._entries = collections.OrderedDict()  # the least recently used one first
        self._num_bytes = self._hits = self._misses = self._evicted = 0
        self._lock = threading.Lock()

    def get(self, ids: Sequence[int]) -> Value | None:
        """Returns what was stored for these ids and is still there; counts a hit or a miss."""
        key = tuple(ids)
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return found[0]

    def put(self, ids: Sequence[int], value: Value, *, num_bytes: int) -> None:
        """Stores a value in place of an older one, unless it is larger than the whole cache."""
        if num_bytes < 1:
            raise ValueError(f"{num_bytes=} must be at least 1, or the cache has no bound")
        key = tuple(ids)
        with self._lock:
            if key in self._entries:
                self._num_bytes -= self._entries.pop(key)[1]
            if num_bytes > self.max_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._num_bytes -= freed
                self._evicted += 1

    def stats(self) -> CacheStats:
        """Returns the counters."""
        with self._lock:
            return CacheStats(
                entries=len(self._entries),
                num_bytes=self._num_bytes,
                hits=self._hits,
                misses=self._misses,
                evicted=self._evicted,
            )
