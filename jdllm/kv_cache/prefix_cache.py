"""A tree of full pages whose K,V is final, each under the page before it.

K,V of a page depends on every token before it, so the path from the top is part
of what is looked up. Inside a block all tokens see each other: K,V of a page smaller
than a block depends on tokens *after* that page too. A node's key is therefore the
tokens of its page or of the whole block around it, whichever is more, and comes
from the caller. The tree owns the pages of its nodes; it never allocates or frees,
`evict` hands page numbers back to the caller.

Locks are taken on whole paths from the top, so a node is locked at least as often
as any node below it: every unlocked node can be evicted, leaves first, and
`num_evictable` is exact.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

Key = tuple[int, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One cached page. `ref_count` counts the running requests that read it."""

    key: Key
    page: int
    parent: Node | None
    children: dict[Key, Node] = dataclasses.field(default_factory=dict)
    ref_count: int = 0
    last_use: int = 0


class PrefixCache:
    """Finds, keeps and evicts shared pages of `page_size`, least recently used first."""

    def __init__(self, page_size: int):
        if page_size < 1:
            raise ValueError(f"{page_size=} must be at least 1")
        self.page_size = page_size
        self.num_nodes = 0
        self.num_evictable = 0
        self._top: dict[Key, Node] = {}
        self._clock = 0
        # (last_use, serial, node); stale entries are skipped when popped.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, keys: Iterable[Key]) -> list[Node]:
        """Returns the longest cached path from the top along `keys`; reads no further key."""
        path: list[Node] = []
        children = self._top
        for key in keys:
            node = children.get(key)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def lock(self, nodes: Iterable[Node]) -> None:
        """Protects a path from eviction; it must start at the top or at a locked node."""
        for node in nodes:
            if node.ref_count == 0:
                self.num_evictable -= 1
            node.ref_count += 1

    def unlock(self, nodes: Iterable[Node]) -> None:
        """Ends one `lock` of the same nodes and marks them as just used."""
        for node in nodes:
            if node.ref_count < 1:
                raise ValueError(f"page {node.page} of the prefix cache is not locked")
            node.ref_count -= 1
            self._touch(node)
            if node.ref_count == 0:
                self.num_evictable += 1
                self._offer(node)

    def insert(self, parent: Node | None, key: Key, page: int) -> Node:
        """Returns the node of `key` under `parent` (None: at the top).

        When it is new, the tree takes `page` over. When the tree holds the same tokens
        already, the node keeps its own page and `page` stays the caller's.
        """
        siblings = self._top if parent is None else parent.children
        node = siblings.get(key)
        if node is None:
            node = siblings[key] = Node(key, page, parent)
            self.num_nodes += 1
            self.num_evictable += 1
            self._touch(node)
            self._offer(node)
        return node

    def evict(self, count: int) -> list[int]:
        """Drops up to `count` unlocked nodes, oldest leaves first; returns their pages."""
        pages: list[int] = []
        while len(pages) < count and self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if node.last_use == last_use and self._is_free_leaf(node):
                self._remove(node)
                pages.append(node.page)
        return pages

    def _siblings(self, node: Node) -> dict[Key, Node]:
        return self._top if node.parent is None else node.parent.children

    def _is_free_leaf(self, node: Node) -> bool:
        is_inside = self._siblings(node).get(node.key) is node
        return is_inside and not node.children and node.ref_count == 0

    def _remove(self, node: Node) -> None:
        del self._siblings(node)[node.key]
        self.num_nodes -= 1
        self.num_evictable -= 1
        if node.parent is not None:
            self._offer(node.parent)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock

    def _offer(self, node: Node) -> None:
        """Makes `node` a candidate of eviction if it is an unlocked leaf."""
        if not self._is_free_leaf(node):
            return
        self._clock += 1
        heapq.heappush(self._leaves, (node.last_use, self._clock, node))
        # Without memory pressure nothing pops; hits would grow the heap for ever.
        if len(self._leaves) > 2 * self.num_nodes + 64:
            fresh = {
                id(entry[2]): entry
                for entry in self._leaves
                if entry[0] == entry[2].last_use and self._is_free_leaf(entry[2])
            }
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)
