"""What a request holds while it runs: one value, from admission until the request leaves its row.

A kind of rows may subclass it. When a request leaves, because it ends, is aborted or preempted,
the whole stay is dropped, so no field is reset by hand. A request that runs again gets a new
stay. Results of a launch belong to the stay that the launch was planned for; stays are compared
by identity.
"""

from __future__ import annotations

import dataclasses

from jdllm.kv_cache import prefix_cache


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """A slot on the device and its pages; rows that keep no K,V have no pages.

    `slot` holds the state of the row. `is_fresh`: no launch has begun the row yet. `pages[i]`
    holds positions from `i * page_size` on; `prefix_nodes` are the prefix-cache nodes that own
    the first pages. K,V of the first `context_len` tokens of the request is final, as far as the
    host knows: a launch in flight may already be ahead of it.
    """

    slot: int
    is_fresh: bool = True
    pages: list[int] = dataclasses.field(default_factory=list)
    prefix_nodes: list[prefix_cache.Node] = dataclasses.field(default_factory=list)
    context_len: int = 0
