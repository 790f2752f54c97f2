"""Which pages a stay holds: its own from the allocator, and shared ones from the prefix cache.

`stay.pages[i]` holds positions from `i * page_size` on. The first `len(stay.prefix_nodes)`
pages belong to the tree of the prefix cache, and the stay locks them; the stay owns the
other pages. A page enters the tree only when all its tokens are below `context_len`: the
in-flight block still changes.

If another request has cached the same tokens first, a running request keeps its duplicate
page and all later pages to itself until it leaves. If it put them below the other's node,
it would lock that node as well, and a request alone in the pool could then run out of the
pages that admission promised.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdllm.kv_cache.allocator import PageAllocator
from jdllm.kv_cache.prefix_cache import Key, Node, PrefixCache
from jdllm.scheduler.request import Request
from jdllm.scheduler.stay import Stay


class RequestPages:
    """Gives pages to stays and takes them back; evicts cached pages when too few are free.

    Rows that keep no K,V have `num_pages` 0. K,V of prefixes are final by whole units: by blocks,
    or by tokens where the context is causal. With `is_shifted`, the first token of a block comes
    from the forward of the last position before it, so a row begins with that position's unit.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        block_size: int,
        prefix_cache: PrefixCache | None,
        is_shifted: bool = False,
        unit: int | None = None,
    ):
        self.allocator = PageAllocator(num_pages)
        self.prefix_cache = prefix_cache
        self._page_size = page_size
        self._block_size = block_size
        self._unit = block_size if unit is None else unit
        self._is_shifted = is_shifted

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction can free."""
        evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return self.allocator.num_free + evictable

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.allocator.num_pages - self.num_available

    def pages_of(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def prefix_len(self, request: Request) -> int:
        """Returns how many committed tokens lie in whole units before the first one to decode."""
        tokens = request.num_tokens - 1 if self._is_shifted else request.num_tokens
        return tokens // self._unit * self._unit

    def cached_prefix_len(self, request: Request) -> int:
        """Returns how many leading tokens of a waiting request the tree holds."""
        return len(self._match(request)) * self._page_size

    def admit(self, request: Request, stay: Stay) -> bool:
        """Takes the cached prefix, and pages for all whole committed blocks and one more block.

        Returns False and changes nothing if there are too few pages.
        """
        nodes = self._match(request)
        # Locked before counting: pages that the request shares must not count as evictable.
        if self.prefix_cache is not None:
            self.prefix_cache.lock(nodes)
        stay.prefix_nodes = nodes
        stay.pages = [node.page for node in nodes]
        stay.context_len = len(nodes) * self._page_size
        if self.grow(stay, request.whole_len(self._unit) + self._block_size):
            return True
        self.release(request, stay, keep=False)
        return False

    def grow(self, stay: Stay, num_tokens: int) -> bool:
        """Adds pages to `stay` until they hold `num_tokens` tokens; False if there are too few."""
        missing = self.pages_of(num_tokens) - len(stay.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.allocator.num_free and self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(missing - self.allocator.num_free))
        stay.pages.extend(self.allocator.allocate(missing))
        return True

    def grow_ahead(self, requests: Sequence[Request], num_blocks: int, *, keep_free: int) -> None:
        """Adds pages for up to `num_blocks` later blocks that the requests can still fill.

        Each request gets pages for one block in turn, while `keep_free` pages remain for others.
        """
        for ahead in range(1, num_blocks + 1):
            for request in requests:
                longest = len(request.prompt_ids) + request.max_new_tokens
                wanted = request.held.context_len + (ahead + 1) * self._block_size
                missing = self.pages_of(wanted) - len(request.held.pages)
                if missing <= 0 or wanted >= longest + self._block_size:
                    continue
                if missing > self.num_available - keep_free:
                    return
                self.grow(request.held, wanted)

    def publish(self, request: Request) -> None:
        """Moves full pages of a running request into the tree, up to the first duplicate."""
        if self.prefix_cache is None:
            return
        stay, token_ids = request.held, request.token_ids
        nodes = stay.prefix_nodes
        for index in range(len(nodes), stay.context_len // self._page_size):
            key = self._key(token_ids, index)
            node = self.prefix_cache.insert(nodes[-1] if nodes else None, key, stay.pages[index])
            if node.page != stay.pages[index]:
                return
            self.prefix_cache.lock((node,))
            nodes.append(node)

    def release(self, request: Request, stay: Stay, *, keep: bool) -> None:
        """Takes every page back; with `keep`, full pages that the tree lacks move into it.

        The stay ends here: its fields are meaningless afterwards.
        """
        own = stay.pages[len(stay.prefix_nodes) :]
        if self.prefix_cache is not None:
            if keep:
                own = self._hand_over(request, stay, self.prefix_cache)
            self.prefix_cache.unlock(stay.prefix_nodes)
        self.allocator.free(own)

    def flush(self) -> None:
        """Removes every page from the tree that is not locked."""
        if self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(self.prefix_cache.num_nodes))

    def _match(self, request: Request) -> list[Node]:
        """Returns the longest cached path of whole pages that ends at the end of a unit."""
        if self.prefix_cache is None:
            return []
        full = self.prefix_len(request) // self._page_size
        token_ids = request.token_ids
        nodes = self.prefix_cache.match(self._key(token_ids, index) for index in range(full))
        usable = len(nodes) * self._page_size // self._unit * self._unit
        return nodes[: usable // self._page_size]

    def _key(self, token_ids: Sequence[int], index: int) -> Key:
        """Returns the tokens that decide the K,V of a page: those of the page or of its unit."""
        start = index * self._page_size
        if self._page_size < self._unit:
            start -= start % self._unit
        return tuple(token_ids[start : start + max(self._page_size, self._unit)])

    def _hand_over(
        self,
        request: Request,
        stay: Stay,
        cache: PrefixCache,
    ) -> list[int]:
        """Gives the tree every full page that it lacks; returns the pages that it did not take."""
        nodes, token_ids = stay.prefix_nodes, request.token_ids
        full = stay.context_len // self._page_size
        parent = nodes[-1] if nodes else None
        refused = stay.pages[max(full, len(nodes)) :]
        for index in range(len(nodes), full):
            parent = cache.insert(parent, self._key(token_ids, index), stay.pages[index])
            if parent.page != stay.pages[index]:
                refused.append(stay.pages[index])
        return refused
