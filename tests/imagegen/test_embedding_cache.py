"""The cache against a list of entries in the order of their use."""

from __future__ import annotations

import concurrent.futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.imagegen import embedding_cache

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=2)
CALLS = st.lists(st.tuples(KEYS, st.none() | st.integers(1, 12)), max_size=60)


@given(st.integers(0, 20), CALLS)
def test_it_holds_what_a_list_in_order_of_use_holds(max_bytes, calls):
    cache = embedding_cache.EmbeddingCache(max_bytes)
    model: list[tuple[list[int], int, int]] = []  # ids, value, bytes; the last used one is last
    hits = misses = evicted = 0
    for value, (ids, num_bytes) in enumerate(calls):
        found = [entry for entry in model if entry[0] == ids]
        if num_bytes is None:
            assert cache.get(ids) == (found[0][1] if found else None)
            hits, misses = hits + len(found), misses + (not found)
        else:
            cache.put(tuple(ids), value, num_bytes=num_bytes)
            found = [(ids, value, num_bytes)]
        model = [entry for entry in model if entry[0] != ids] + found
        if found and found[0][2] > max_bytes:
            model.remove(found[0])
        while sum(entry[2] for entry in model) > max_bytes:
            del model[0]
            evicted += 1
        assert cache.stats() == embedding_cache.CacheStats(
            entries=len(model),
            num_bytes=sum(entry[2] for entry in model),
            hits=hits,
            misses=misses,
            evicted=evicted,
        )
    for ids, value, _ in model:
        assert cache.get(ids) == value


def test_sizes_without_a_bound_are_refused():
    with pytest.raises(ValueError, match="max_bytes=-1"):
        embedding_cache.EmbeddingCache(-1)
    with pytest.raises(ValueError, match="num_bytes=0"):
        embedding_cache.EmbeddingCache(5).put([1], "value", num_bytes=0)


def test_threads_lose_no_count():
    cache = embedding_cache.EmbeddingCache(50)

    def work(worker):
        for i in range(500):
            if cache.get([i % 13]) is None:
                cache.put([i % 13], worker, num_bytes=5)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stats = cache.stats()
    assert stats.hits + stats.misses == 2000
    assert (stats.num_bytes, stats.entries) == (50, 10)
