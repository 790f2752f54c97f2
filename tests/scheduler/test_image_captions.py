"""The store of captions against a list in order of use."""

import random

import pytest

from jdllm import errors
from jdllm.scheduler.rows.image.captions import CaptionStay, CaptionStore


def stay(entries):
    return CaptionStay(slot=0, entries=entries)


class Simple:
    """The same in plain words: [caption, holders, is written], the least recently left first."""

    def __init__(self, size):
        self.size, self.known, self.encoded = size, [], 0

    def take(self, captions):
        held = {one[0] for one in self.known if one[1]}
        if len(held | set(captions)) > self.size:
            return False
        for caption in captions:
            found = next((one for one in self.known if one[0] == caption), None)
            if found is None:
                if len(self.known) == self.size:
                    free = [one for one in self.known if not one[1] and one[0] not in captions]
                    self.known.remove(free[0])
                self.known.append(found := [caption, 0, False])
            found[1] += 1
        return True

    def release(self, captions):
        for caption in captions:
            found = next(one for one in self.known if one[0] == caption)
            found[1] -= 1
            if not found[1]:
                self.known.remove(found)
                if found[2]:
                    self.known.append(found)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_it_holds_what_a_list_in_order_of_use_holds(size):
    rng = random.Random(size)
    store, simple, held = CaptionStore(size), Simple(size), []
    for _ in range(3000):
        action = rng.random()
        if action < 0.5:
            captions = [(rng.randrange(9),) for _ in range(rng.choice([1, 1, 2]))]
            entries = store.take(captions)
            assert (entries is not None) == simple.take(captions)
            if entries is not None:
                held.append((captions, entries))
        elif action < 0.8 and held:
            captions, entries = held.pop(rng.randrange(len(held)))
            store.release(stay(entries))
            simple.release(captions)
        elif action < 0.98 and held:
            captions, entries = rng.choice(held)
            store.note_written(entries[0])
            next(one for one in simple.known if one[0] == captions[0])[2] = True
        else:
            store.flush()
            simple.known = [one for one in simple.known if one[1]]
        assert {c: e.num_holders for c, e in by_caption(store).items()} == {
            caption: holders for caption, holders, _ in simple.known
        }
        assert {c for c, e in by_caption(store).items() if e.is_written} == {
            caption for caption, _, is_written in simple.known if is_written
        }
        for captions, entries in held:
            assert [store.caption(entry) for entry in entries] == captions
        assert store.num_held == sum(bool(one[1]) for one in simple.known)
        assert store.num_cached == sum(not one[1] for one in simple.known)
    assert store.hits and store.misses and store.evictions


def by_caption(store):
    return {entry.caption: entry for entry in store._entries.values()}


def test_a_store_without_entries_is_refused():
    with pytest.raises(errors.ConfigError, match="num_entries=0"):
        CaptionStore(0)
