"""Laws of the page allocator against a set of taken pages."""

import random

import pytest

from jdllm.kv_cache import allocator


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_set_under_random_operations(seed):
    rng = random.Random(seed)
    num_pages = rng.randint(1, 40)
    pages = allocator.PageAllocator(num_pages)
    taken: set[int] = set()
    for _ in range(300):
        if rng.random() < 0.5:
            count = rng.randint(0, 6)
            if count > num_pages - len(taken):
                with pytest.raises(allocator.OutOfPages):
                    pages.allocate(count)
            else:
                new = pages.allocate(count)
                assert len(set(new)) == count and not taken & set(new)
                assert all(0 <= page < num_pages for page in new)
                taken |= set(new)
        else:
            back = rng.sample(sorted(taken), rng.randint(0, min(5, len(taken))))
            pages.free(back)
            taken -= set(back)
        assert pages.num_free == num_pages - len(taken)
        assert {page for page in range(num_pages) if pages.is_used[page]} == taken


@pytest.mark.parametrize("bad", [[2], [0, 0], [-1], [4], [0, 2]])
def test_freeing_what_is_not_held_raises_and_frees_nothing(bad):
    pages = allocator.PageAllocator(4)
    assert sorted(pages.allocate(2)) == [0, 1]
    with pytest.raises(ValueError, match="page"):
        pages.free(bad)
    assert pages.num_free == 2
    pages.free([1, 0])
    with pytest.raises(ValueError, match="not an allocated page"):
        pages.free([1])


def test_allocation_is_all_or_nothing():
    pages = allocator.PageAllocator(3)
    with pytest.raises(allocator.OutOfPages, match="4 pages wanted, 3 of 3 free"):
        pages.allocate(4)
    assert sorted(pages.allocate(3)) == [0, 1, 2]
