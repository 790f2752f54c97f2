"""What a request holds while it runs: one value, from admission until it leaves its row.

A kind of rows may subclass it. When a request leaves, by its end, an abort or preemption, the
whole stay goes, so nothing of it is reset by hand; a request that comes back has a new one.
Results of a launch belong to the stay that the launch was planned for, known by identity.
"""

from __future__ import annotations

import dataclasses

from jdllm.kv_cache import prefix_cache


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """A place on the device, and the pages behind it, none for rows that keep no K,V.

    `slot` is the place of the row's state. `is_fresh`: no launch has begun the row yet.
    `pages[i]` holds positions from `i * page_size` on; `prefix_nodes` are the prefix-cache nodes
    that own the first of them. `context_len` is the number of leading tokens of the request whose
    K,V in `pages` is final, as far as the host knows: a launch in flight may be ahead of it.
    """

    slot: int
    is_fresh: bool = True
    pages: list[int] = dataclasses.field(default_factory=list)
    prefix_nodes: list[prefix_cache.Node] = dataclasses.field(default_factory=list)
    context_len: int = 0
