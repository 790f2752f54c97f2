"""Laws of the prefix tree against a dict from token prefixes to facts."""

import random

import pytest

from jdllm.kv_cache import prefix_cache


class Oracle:
    """The same tree as a flat dict: whole prefix -> [page, locks, last use]."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.entries = {}
        self.clock = 0

    def match(self, tokens, limit):
        pages = []
        for end in range(self.page_size, min(limit, len(tokens)) + 1, self.page_size):
            if tuple(tokens[:end]) not in self.entries:
                break
            pages.append(self.entries[tuple(tokens[:end])][0])
        return pages

    def touch(self, prefix):
        self.clock += 1
        self.entries[prefix][2] = self.clock

    def leaves(self):
        inner = {prefix[: -self.page_size] for prefix in self.entries}
        return [p for p, entry in self.entries.items() if p not in inner and entry[1] == 0]

    def evict(self, count):
        pages = []
        while len(pages) < count and self.leaves():
            oldest = min(self.leaves(), key=lambda prefix: self.entries[prefix][2])
            pages.append(self.entries.pop(oldest)[0])
        return pages


def keys(tokens, page_size=1):
    ends = range(page_size, len(tokens) + 1, page_size)
    return (tuple(tokens[end - page_size : end]) for end in ends)


def prefixes(tokens, page_size, count):
    return [tuple(tokens[: (i + 1) * page_size]) for i in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_a_flat_dict_under_random_operations(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3])
    cache, oracle = prefix_cache.PrefixCache(page_size), Oracle(page_size)
    locked, next_page = [], 0
    for _ in range(400):
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 5 * page_size))]
        limit = rng.randint(0, len(tokens))
        path = cache.match(keys(tokens[:limit], page_size))
        assert [node.page for node in path] == oracle.match(tokens, limit)
        action = rng.choice(["insert", "insert", "lock", "unlock", "evict"])
        if action == "insert":
            parent = None
            for prefix in prefixes(tokens, page_size, len(tokens) // page_size):
                parent = cache.insert(parent, prefix[-page_size:], next_page)
                if prefix not in oracle.entries:
                    oracle.entries[prefix] = [next_page, 0, 0]
                    oracle.touch(prefix)
                assert parent.page == oracle.entries[prefix][0]
                next_page += 1
        elif action == "lock":
            cache.lock(path)
            held = prefixes(tokens, page_size, len(path))
            for prefix in held:
                oracle.entries[prefix][1] += 1
            locked.append((path, held))
        elif action == "unlock" and locked:
            path, held = locked.pop(rng.randrange(len(locked)))
            cache.unlock(path)
            for prefix in held:
                oracle.entries[prefix][1] -= 1
                oracle.touch(prefix)
        elif action == "evict":
            count = rng.randint(0, 3)
            assert cache.evict(count) == oracle.evict(count)
        assert cache.num_nodes == len(oracle.entries)
        assert cache.num_evictable == sum(e[1] == 0 for e in oracle.entries.values())
    for path, _ in locked:
        cache.unlock(path)
    assert cache.num_evictable == cache.num_nodes
    assert len(cache.evict(10**6)) == len(oracle.entries)
    assert cache.num_nodes == 0 == cache.num_evictable


def test_every_unlocked_page_can_be_evicted_beside_a_locked_path():
    cache = prefix_cache.PrefixCache(1)
    root = cache.insert(None, (0,), 0)
    cache.lock(cache.match(keys([0])))
    child = cache.insert(root, (1,), 1)
    cache.insert(child, (2,), 2)
    cache.insert(root, (3,), 3)
    assert cache.num_evictable == 3
    assert cache.evict(9) == [2, 1, 3]
    assert cache.num_nodes == 1
    assert cache.match(keys([0, 1])) == [root]


def test_the_same_key_under_other_parents_is_another_node():
    cache = prefix_cache.PrefixCache(2)
    a = cache.insert(None, (1, 1), 0)
    b = cache.insert(None, (2, 2), 1)
    cache.insert(a, (9, 9), 2)
    assert [n.page for n in cache.match([(1, 1), (9, 9)])] == [0, 2]
    assert cache.match([(2, 2), (9, 9)]) == [b]
    assert cache.match([(9, 9)]) == []


def test_hits_without_pressure_keep_the_candidate_heap_small():
    cache = prefix_cache.PrefixCache(1)
    path = [cache.insert(None, (0,), 0)]
    for _ in range(5000):
        cache.lock(path)
        cache.unlock(path)
    assert len(cache._leaves) < 200
    assert cache.evict(2) == [0]


def test_unlocking_what_is_not_locked_raises():
    cache = prefix_cache.PrefixCache(2)
    node = cache.insert(None, (1, 2), 0)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock([node])
