"""Rows of launches after a lack of memory: fewer, and after a while more again."""

import random

import pytest
from support.image_fake import SMALL, Client, ask, build, random_ask
from support.image_watch import check_memory, check_products

from jdllm.engine.core import LaunchFailed
from jdllm.scheduler.rows.image import buckets, row_limits

LADDER = (1, 2, 4, 8, 12)


def decode(rows, width=128):
    return buckets.DecodeBucket(rows=rows, height=64, width=width, output="image")


def good(limits, rows, count):
    """Notes good launches; returns how often the shape got more rows."""
    return sum(limits.note_good(decode(rows), lambda _: LADDER) for _ in range(count))


def test_half_as_many_rows_then_one_and_other_shapes_keep_theirs():
    limits = row_limits.RowLimits()
    assert limits.halve(decode(12)) and limits.allowed(decode(1), LADDER) == (1, 2, 4)
    assert limits.halve(decode(4)) and limits.allowed(decode(1), LADDER) == (1,)
    assert not limits.halve(decode(1))
    assert limits.allowed(decode(1, width=64), LADDER) == LADDER


def test_rows_grow_by_one_size_after_enough_launches_that_are_as_large_as_allowed():
    limits = row_limits.RowLimits(10)
    limits.halve(decode(12))
    assert not good(limits, 2, 99), "smaller launches say nothing"
    assert not good(limits, 4, 9) and good(limits, 4, 1)
    assert limits.allowed(decode(1), LADDER) == (1, 2, 4, 8)
    assert good(limits, 8, 10)
    assert limits.allowed(decode(1), LADDER) == LADDER
    good(limits, 12, 10)  # then the fault is forgotten: the next one is a first one
    assert limits.halve(decode(12)) and limits.allowed(decode(1), LADDER) == (1, 2, 4)


def test_a_trial_that_fails_goes_back_to_what_was_good_and_the_next_one_waits_longer():
    limits = row_limits.RowLimits(10)
    limits.halve(decode(12))
    good(limits, 4, 10)
    good(limits, 8, 10)
    assert limits.halve(decode(12)) and limits.allowed(decode(1), LADDER) == (1, 2, 4, 8)
    assert not good(limits, 8, 39) and good(limits, 8, 1)
    assert limits.halve(decode(12)) and limits.allowed(decode(1), LADDER) == (1, 2, 4, 8)
    assert limits.halve(decode(8)) and limits.allowed(decode(1), LADDER) == (1,)


def test_a_lasting_lack_of_memory_costs_few_faults():
    limits, faults, launches = row_limits.RowLimits(), [], 100_000
    for number in range(launches):
        rows = limits.allowed(decode(1), LADDER)[-1]
        if rows > 4:
            faults.append(number)
            assert limits.halve(decode(rows))
        else:
            limits.note_good(decode(rows), lambda _: LADDER)
    # Each gap is four times the one before: about log4(100,000 / 128) trials.
    assert 3 <= len(faults) <= 8
    gaps = [b - a for a, b in zip(faults, faults[1:], strict=False)]
    assert min(gaps) >= row_limits.FIRST_PATIENCE and gaps == sorted(gaps)


@pytest.mark.parametrize("overlaps", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_while_memory_comes_and_goes_nothing_is_lost_and_large_launches_come_back(overlaps, seed):
    rng = random.Random(repr((overlaps, seed)))
    patience, lacks = 8, {"now": False}
    core, device = build(
        rng, overlaps=overlaps, most=lambda bucket: rng.choice([1, 2]) if lacks["now"] else 99
    )
    core.scheduler.rows._row_limits = row_limits.RowLimits(patience)
    asks = [random_ask(rng, seed + 100) for seed in range(120)]
    client, todo, halved = Client(), asks[::-1], []
    while todo or core.has_work:
        for _ in range(rng.choice([0, 0, 1, 4])):
            if todo:
                core.add([todo.pop()])
        lacks["now"] = 40 < len(client.products) < 80
        try:
            client.take(core.step())
        except LaunchFailed as failed:
            client.take(failed.commits)
            assert not failed.requests
            halved.append(len(device.trace))
        check_memory(core)
    check_products(asks, client, set())
    assert halved
    lacks["now"] = False
    # The size that was tried last may wait for the longest patience that its faults made.
    core.add([ask(50, size=SMALL, prompt=(n,)) for n in range(200)])
    begin = len(device.trace)
    while core.has_work:
        client.take(core.step())
    steps = [b for b in device.trace[begin:] if b.bucket.name == "step"]
    assert max(b.bucket.rows for b in steps) == 4, "memory is there, and nobody uses it"
    assert len(halved) < len(device.trace) / patience
