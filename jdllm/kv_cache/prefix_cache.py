"""A tree of full pages whose K,V is final; the parent of a page is the page before it.

K,V of a page depends on every token before the page, so a lookup follows the whole path
from the top. Inside a block all tokens see each other, so K,V of a page smaller than a
block also depends on tokens *after* the page. A node's key is therefore the tokens of its
page or of the whole block around it, whichever is larger; the caller computes it. The tree
owns the pages of its nodes. It never allocates or frees pages: `evict` hands page numbers
back to the caller.

The caller locks whole paths from the top, so a node has at least as many locks as any node
below it. Every unlocked node can therefore be evicted, leaves first, and `num_evictable` is
exact.
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
        """Returns the longest cached path from the top along `keys`; stops reading at a miss."""
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
        """Protects a path from eviction; the path must start at the top or below a locked node."""
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

        If the node is new, the tree becomes the owner of `page`. If the tree already holds
        the same tokens, the node keeps its own page and the caller keeps `page`.
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
        """Drops up to `count` unlocked nodes, the oldest leaves first, and returns their pages."""
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
        """Makes `node` a candidate for eviction if it is an unlocked leaf."""
        if not self._is_free_leaf(node):
            return
        self._clock += 1
        heapq.heappush(self._leaves, (node.last_use, self._clock, node))
        # Without memory pressure nothing is popped, and the heap would grow with every hit.
        if len(self._leaves) > 2 * self.num_nodes + 64:
            fresh = {
                id(entry[2]): entry
                for entry in self._leaves
                if entry[0] == entry[2].last_use and self._is_free_leaf(entry[2])
            }
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)
