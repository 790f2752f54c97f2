"""The device's idle time is arithmetic of samples."""

import concurrent.futures
import time

from support import hash_engine
from support.waiting import wait_until

from jdllm.engine import device_clock


def run(samples):
    """Looks of (time, is_busy), None for a pause; returns (idle, total) seconds."""
    moment = iter([sample[0] for sample in samples if sample is not None])
    clock = device_clock.DeviceClock(now=lambda: next(moment))
    for sample in samples:
        if sample is None:
            clock.pause()
        else:
            clock.sample(sample[1])
    return clock.idle_s, clock.total_s


def test_the_time_after_an_idle_look_counts():
    assert run([]) == (0, 0)
    assert run([(5, False)]) == (0, 0)
    assert run([(0, False), (2, True), (7, True), (8, False), (11, True)]) == (5, 11)


def test_a_pause_does_not_count():
    assert run([(0, True), (1, False), None, (100, False), (103, True)]) == (3, 4)


def test_the_time_without_requests_does_not_count_however_the_last_one_left():
    with hash_engine.make_engine() as engine:
        core, skipped_s = engine._built.core, []
        core._overlaps = False
        model = engine._built.runner
        model.hold()  # or all would be written before it is aborted
        core.clock._now = lambda: time.monotonic() + sum(skipped_s)
        events = engine.generate(
            input_ids=[1, 2, 3],
            sampling_params={"max_new_tokens": 40, "ignore_eos": True},
            stream=True,
        )
        for _ in range(2):  # of the prompt, and of its first block
            model.release_one()
        next(iter(events))
        with concurrent.futures.ThreadPoolExecutor() as threads:
            aborting = threads.submit(engine.abort, abort_all=True)
            while not aborting.done():  # which is between two launches
                model.release_one()
                time.sleep(0.01)
        assert aborting.result() == 1
        model.go_on()
        wait_until(lambda: not core.has_work)
        hour_s = 3600.0
        engine._loop.call(lambda: skipped_s.append(hour_s)).result()  # between two rounds
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 20})
        stats = engine.stats()
        assert 0 <= stats.device_idle_seconds_total <= stats.device_seconds_total
        assert 0 < stats.device_seconds_total < hour_s
