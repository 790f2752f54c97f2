"""Programs that are compiled when somebody first asks for them."""

from __future__ import annotations

import threading
import time

import pytest
from support import work

from jdllm import errors
from jdllm.device import devices
from jdllm.engine.start import sizing
from jdllm.engine.start.images import build, first_use
from jdllm.runner.image import sizes
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image.buckets import ImageBuckets, StepBucket


def bucket(rows):
    return StepBucket(rows=rows, tokens=32, height=64, width=64, is_guided=False)


class Runner:
    """Compiles when it may, but for `faulty` buckets; `order` are the rows of what was asked."""

    def __init__(self, *faulty):
        self.order, self.done, self.may_go = [], set(), threading.Event()
        self.faulty, self.forgotten = faulty, []

    def forget(self, one):
        self.done.discard(one)
        self.forgotten.append(one)

    @property
    def bytes_by_bucket(self):
        return {one: 100 * one.rows for one in self.done}

    def has_program(self, one):
        return one in self.done

    def compile(self, buckets):
        (one,) = buckets
        self.order.append(one.rows)
        assert self.may_go.wait(30)
        self.done.add(one)
        if one in self.faulty:
            raise RuntimeError("no such kernel")


def wait_for(condition):
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_each_program_is_compiled_once_those_of_few_rows_first():
    runner = Runner()
    asked = first_use.FirstUse(runner)
    assert not any(asked.is_ready(bucket(rows)) for rows in (1, 3, 2, 1, 3))
    wait_for(lambda: runner.order == [1])  # the question does not wait
    runner.may_go.set()
    wait_for(lambda: asked.is_ready(bucket(3)))
    asked.close()
    assert runner.order == [1, 2, 3]
    assert asked.num_compiled == 3


def test_a_program_that_cannot_be_compiled_leaves_its_rows_to_smaller_ones():
    runner = Runner(bucket(1), bucket(2))
    runner.may_go.set()
    asked = first_use.FirstUse(runner)
    assert not any(asked.is_ready(bucket(rows)) for rows in (1, 2))
    wait_for(lambda: asked.num_failed == 2)
    asked.close()
    assert asked.is_ready(bucket(1)), "the launch tells the fault"
    assert not asked.is_ready(bucket(2)), "one row at a time is served"
    assert runner.order == [1, 2]
    assert (asked.num_compiled, asked.num_waiting) == (0, 0)


def test_a_program_without_room_leaves_its_rows_to_smaller_ones_and_one_row_is_tried():
    runner = Runner()
    runner.may_go.set()
    for free_bytes, rows, ready in [
        (399, 3, True),
        (399, 4, False),
        (-1, 1, True),
        (None, 8, True),
    ]:
        asked = first_use.FirstUse(runner, free_bytes=free_bytes)
        runner.done.clear()
        asked.is_ready(bucket(rows))
        wait_for(lambda asked=asked: not asked.num_waiting)
        assert asked.is_ready(bucket(rows)) == ready
        assert (asked.num_compiled, asked.num_failed) == (1, 0)
        asked.close()


@pytest.mark.parametrize(
    ("fraction", "decode_rows"), [(0.9, (1, 2, 4)), (0.65, (1, 2)), (0.1, (1,))]
)
def test_launches_are_admitted_within_the_share_of_memory_that_the_flag_gives(
    monkeypatch, fraction, decode_rows
):
    # A decode launch needs 10 GB for each image; weights, latents and captions take 40 of 100 GB.
    monkeypatch.setattr(devices, "memory_use", lambda count: (40 * 10**9, 100 * 10**9))
    buckets = ImageBuckets(
        sizes=((512, 512),), most_decode_rows=image_buckets.rows_by_pixels(8 * 512 * 512)
    )
    measured = {one: 10**10 * one.rows for one in buckets.all() if one.name == "decode"}
    found = sizes.fitted(buckets, measured, sizing.free_bytes(fraction))
    assert found.decode_sizes(512, 512) == decode_rows


def test_the_least_recently_used_program_goes_and_can_come_back():
    runner = Runner(bucket(3))
    runner.may_go.set()
    asked = first_use.FirstUse(runner, max_programs=2)

    def ready(rows):
        wait_for(lambda: asked.is_ready(bucket(rows)))

    ready(1)
    assert not asked.is_ready(bucket(3))  # it fails, and that is remembered as a program is
    wait_for(lambda: asked.num_failed == 1)
    ready(1)
    ready(4)
    assert runner.forgotten == [bucket(3)]
    ready(1)
    ready(5)
    assert runner.forgotten == [bucket(3), bucket(4)]
    ready(4)
    assert runner.forgotten == [bucket(3), bucket(4), bucket(1)]
    asked.close()
    assert runner.order == [1, 3, 4, 5, 4]


def test_few_programs_wait_and_the_others_are_asked_for_again():
    runner = Runner()
    asked = first_use.FirstUse(runner, max_waiting=2)
    assert not any(asked.is_ready(bucket(rows)) for rows in range(1, 9))
    assert asked.num_waiting == 2
    runner.may_go.set()
    for rows in range(1, 9):
        wait_for(lambda rows=rows: asked.is_ready(bucket(rows)))
    asked.close()
    assert sorted(runner.order) == list(range(1, 9))


def test_the_number_that_waits_costs_the_same_however_many_wait_or_are_there():
    runner = Runner()
    asked = first_use.FirstUse(runner)
    empty = work.bytecodes(lambda: asked.num_waiting)
    runner.may_go.set()
    for rows in range(1, 41):
        wait_for(lambda rows=rows: asked.is_ready(bucket(rows)))
    runner.may_go.clear()
    for rows in range(41, 61):
        asked.is_ready(bucket(rows))
    found = asked.num_waiting, work.bytecodes(lambda: asked.num_waiting)
    runner.may_go.set()
    asked.close()
    assert found == (20, empty)


def test_programs_of_the_start_are_compiled_behind_those_of_one_row_and_are_kept():
    runner = Runner(bucket(4))
    asked = first_use.FirstUse(runner, max_programs=1, max_waiting=1)
    asked.compile_later([bucket(rows) for rows in (2, 4, 8, 12)])
    wait_for(lambda: runner.order == [2])
    assert not asked.is_ready(bucket(1)) and not asked.is_ready(bucket(8))
    assert asked.num_waiting == 5, "a question about one that comes anyway adds none"
    runner.may_go.set()
    wait_for(lambda: not asked.num_waiting)
    assert runner.order == [2, 1, 4, 8, 12]
    assert [asked.is_ready(bucket(rows)) for rows in (1, 2, 4, 8, 12)] == [1, 1, 0, 1, 1]
    for rows in (3, 5):  # only what was asked for is ever forgotten
        wait_for(lambda rows=rows: asked.is_ready(bucket(rows)))
    asked.close()
    assert not {bucket(2), bucket(8), bucket(12)} & set(runner.forgotten)
    assert (asked.num_compiled, asked.num_failed) == (6, 1)


def test_a_program_that_fails_is_never_ready_in_between():
    compiled = threading.Event()

    class Late(Runner):
        def compile(self, buckets):
            try:
                super().compile(buckets)
            finally:
                self.done.update(buckets)  # the runner knows the fault before `FirstUse` does
                compiled.set()
                time.sleep(0.05)

    runner = Late(bucket(2))
    asked = first_use.FirstUse(runner)
    asked.compile_later([bucket(2)])
    runner.may_go.set()
    assert compiled.wait(30)
    while asked.num_waiting:
        assert not asked.is_ready(bucket(2))
    assert not asked.is_ready(bucket(2))
    asked.close()


def test_closing_begins_no_other_compilation_and_waits_for_none():
    runner = Runner()
    asked = first_use.FirstUse(runner)
    for rows in (1, 2, 4):
        asked.is_ready(bucket(rows))
    wait_for(lambda: runner.order)
    asked.close()
    assert not runner.done
    runner.may_go.set()
    wait_for(lambda: asked.num_compiled == 1)
    asked._executor.shutdown(wait=True)
    assert runner.order == [1]
    assert not asked.is_ready(bucket(8)), "a question after the end is answered"


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_running_requests", 0), ("batching_max_size", 0), ("batching_delay_ms", -1.0)],
)
def test_options_without_meaning_are_refused_by_name(tmp_path, option, value):
    with pytest.raises(errors.ConfigError, match=f"{option}={value}"):
        build.ImageBuildConfig(directory=tmp_path, **{option: value})
