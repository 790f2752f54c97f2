"""Which pages a stay holds: its own from the allocator, shared ones from the tree.

`stay.pages[i]` holds positions `i * page_size` and on. The first
`len(stay.prefix_nodes)` pages belong to the prefix cache and are locked by the
stay; the rest is its own. Only pages whose tokens are all below
`context_len` ever enter the tree: the in-flight block is scratch.

When another request has cached the same tokens first, a running request keeps
its twin page, and with it all later ones, to itself until it leaves. Hanging them
under the other's node would pin that node as well, and a request alone in the
pool could then run out of the pages it was promised.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdllm.kv_cache import allocator as allocator_lib
from jdllm.kv_cache import prefix_cache as prefix_cache_lib
from jdllm.scheduler import request as request_lib
from jdllm.scheduler import stay as stay_lib


class RequestPages:
    """Gives pages to stays and takes them back; evicts cached ones when short.

    With `num_pages` 0 there are none, for rows that keep no K,V.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        block_size: int,
        prefix_cache: prefix_cache_lib.PrefixCache | None,
    ):
        self.allocator = allocator_lib.PageAllocator(num_pages)
        self.prefix_cache = prefix_cache
        self._page_size = page_size
        self._block_size = block_size

    @property
    def num_available(self) -> int:
        """Pages that are free or can be freed by eviction."""
        evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return self.allocator.num_free + evictable

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.allocator.num_pages - self.num_available

    def pages_of(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def cached_prefix_len(self, request: request_lib.Request) -> int:
        """Returns how many leading tokens of a waiting request are in the tree."""
        return len(self._match(request)) * self._page_size

    def admit(self, request: request_lib.Request, stay: stay_lib.Stay) -> bool:
        """Takes the cached prefix and pages up to one block past whole committed blocks.

        False, and nothing changed, when they are not to be had.
        """
        nodes = self._match(request)
        # Locked before counting: what it shares must not count as evictable for it.
        if self.prefix_cache is not None:
            self.prefix_cache.lock(nodes)
        stay.prefix_nodes = nodes
        stay.pages = [node.page for node in nodes]
        stay.context_len = len(nodes) * self._page_size
        if self.grow(stay, request.whole_len(self._block_size) + self._block_size):
            return True
        self.release(request, stay, keep=False)
        return False

    def grow(self, stay: stay_lib.Stay, num_tokens: int) -> bool:
        """Makes the pages of `stay` hold `num_tokens` tokens; False if they cannot."""
        missing = self.pages_of(num_tokens) - len(stay.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.allocator.num_free and self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(missing - self.allocator.num_free))
        stay.pages.extend(self.allocator.allocate(missing))
        return True

    def grow_ahead(
        self, requests: Sequence[request_lib.Request], num_blocks: int, *, keep_free: int
    ) -> None:
        """Gets pages for blocks after the present ones that the requests can still fill.

        In turn, a block each, as long as `keep_free` pages are to be had for others.
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

    def publish(self, request: request_lib.Request) -> None:
        """Moves newly full pages of a running request into the tree, up to the first twin."""
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

    def release(self, request: request_lib.Request, stay: stay_lib.Stay, *, keep: bool) -> None:
        """Takes every page back; with `keep`, full pages that the tree lacks go there.

        The stay is over: its fields mean nothing afterwards.
        """
        own = stay.pages[len(stay.prefix_nodes) :]
        if self.prefix_cache is not None:
            if keep:
                own = self._bequeath(request, stay, self.prefix_cache)
            self.prefix_cache.unlock(stay.prefix_nodes)
        self.allocator.free(own)

    def flush(self) -> None:
        """Empties the tree of everything that is not locked."""
        if self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(self.prefix_cache.num_nodes))

    def _match(self, request: request_lib.Request) -> list[prefix_cache_lib.Node]:
        """Returns the cached path of whole pages that is also one of whole blocks."""
        if self.prefix_cache is None:
            return []
        full = request.whole_len(self._block_size) // self._page_size
        token_ids = request.token_ids
        nodes = self.prefix_cache.match(self._key(token_ids, index) for index in range(full))
        usable = len(nodes) * self._page_size // self._block_size * self._block_size
        return nodes[: usable // self._page_size]

    def _key(self, token_ids: Sequence[int], index: int) -> prefix_cache_lib.Key:
        """Returns the tokens that decide the K,V of a page: its own, or its block's if more."""
        start = index * self._page_size
        if self._page_size < self._block_size:
            start -= start % self._block_size
        return tuple(token_ids[start : start + max(self._page_size, self._block_size)])

    def _bequeath(
        self,
        request: request_lib.Request,
        stay: stay_lib.Stay,
        cache: prefix_cache_lib.PrefixCache,
    ) -> list[int]:
        """Gives the tree every full page it lacks; returns the pages it did not take."""
        nodes, token_ids = stay.prefix_nodes, request.token_ids
        full = stay.context_len // self._page_size
        parent = nodes[-1] if nodes else None
        refused = stay.pages[max(full, len(nodes)) :]
        for index in range(len(nodes), full):
            parent = cache.insert(parent, self._key(token_ids, index), stay.pages[index])
            if parent.page != stay.pages[index]:
                refused.append(stay.pages[index])
        return refused
