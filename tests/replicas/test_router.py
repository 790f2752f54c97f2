"""Which replica a prompt goes to, against a plain model of loads and prefixes."""

import collections
import contextlib
import random

from support import work

from jdllm.replicas import routing

NAMES = ("a", "b", "c")


def test_without_load_replicas_take_turns():
    router = routing.Router(page=0, margin=2)
    chosen = [router.choose([1, 2, 3], NAMES) for _ in range(6)]
    assert collections.Counter(chosen) == {"a": 2, "b": 2, "c": 2}


def test_the_least_loaded_is_chosen_whatever_the_order_of_events():
    router, draw = routing.Router(page=0, margin=5), random.Random(0)
    running: list[tuple[str, int, contextlib.ExitStack]] = []
    for _ in range(300):
        loads = {name: sum(n for one, n, _ in running if one == name) for name in NAMES}
        assert {name: router.load(name) for name in NAMES} == loads
        chosen = router.choose([draw.randrange(9)] * 8, NAMES)
        assert loads[chosen] == min(loads.values())
        num_choices, stack = draw.randint(1, 4), contextlib.ExitStack()
        stack.enter_context(router.hold(chosen, num_choices))
        running.append((chosen, num_choices, stack))
        while len(running) > draw.randint(0, 12):
            running.pop(draw.randrange(len(running)))[2].close()


def test_a_prompt_goes_where_its_longest_prefix_was():
    router = routing.Router(page=4, margin=2)
    shared = list(range(8))
    home = router.choose([*shared, 1, 1, 1, 1], NAMES)
    others = [router.choose([50 + i] * 8, NAMES) for i in range(5)]
    assert set(others) == set(NAMES)
    assert router.choose([*shared, 2, 2, 2, 2], NAMES) == home
    # Less than a page in common is no prefix, nor is the same page behind another one.
    assert routing.Router(page=4, margin=2).choose(shared[:3], NAMES) in NAMES
    fresh = routing.Router(page=4, margin=2)
    first = fresh.choose([9, 9, 9, 9, 1, 2, 3, 4], NAMES)
    assert fresh.choose([8, 8, 8, 8, 1, 2, 3, 4], NAMES) != first


def test_a_prefix_yields_to_load_beyond_the_margin():
    router, prompt = routing.Router(page=2, margin=3), [1, 2, 3, 4]
    home = router.choose(prompt, NAMES)
    with router.hold(home, 3):
        assert router.choose(prompt, NAMES) == home
        with router.hold(home, 1):
            away = router.choose(prompt, NAMES)
            assert away != home
    assert router.choose(prompt, NAMES) == away  # it has the prefix now, too, and more recently


def test_a_replica_that_is_gone_is_no_home():
    router, prompt = routing.Router(page=2, margin=3), [1, 2, 3, 4]
    home = router.choose(prompt, NAMES)
    left = set(NAMES) - {home}
    assert router.choose(prompt, left) in left
    assert router.choose(prompt, ()) is None
    router.forget(home)
    assert router.choose(prompt, NAMES) in left


def test_the_memory_of_prefixes_is_bounded():
    router = routing.Router(page=1, margin=3, remembered=4)
    first = router.choose([1], NAMES)
    for token in range(2, 7):
        router.choose([token], NAMES)
    # Token 1 is forgotten, so its prompt goes to the one whose turn it is.
    assert len(router._homes) == 4
    expected = next(name for name in NAMES if name == first)
    assert router.choose([1], NAMES) == expected


def test_a_replica_with_many_prefixes_is_forgotten_at_once():
    """When a replica is lost, each of its requests says so, and all others wait meanwhile."""
    costs = []
    for count in (10, 1000):
        router = routing.Router(page=1, margin=3)
        for token in range(count):
            router.choose([token], ["a"])
        costs.append(work.bytecodes(lambda router=router: router.forget("a")))
        assert {router.choose([token], NAMES) for token in range(9)} == set(NAMES)
    assert costs[0] == costs[1]


def test_a_replica_that_comes_back_is_home_to_new_prompts_only():
    router = routing.Router(page=1, margin=9)
    with router.hold("b", 1):
        assert router.choose([1], "ab") == "a"
        router.forget("a")
        assert router.choose([2], "ab") == "a"
    with router.hold("a", 1):
        assert router.choose([1], "ab") == "b"
        assert router.choose([2], "ab") == "a"
