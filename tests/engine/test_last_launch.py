"""Behind a launch that should end all its rows nothing is started, unless it takes too long."""

import math
import random
import types

import pytest
from support import hand_written
from support.canvas_hash_model import PAGE, CanvasModel, build, random_request

from jdllm.engine import pacing
from jdllm.engine.core import EngineCore, LaunchFailed
from jdllm.scheduler.batch import LaunchResult, ScheduleBatch
from jdllm.scheduler.rows import block, canvas

STEP_S = 0.005


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Launch:
    """Ends at a time of the clock; whoever asks for its result sooner waits until then."""

    def __init__(self, clock, ends_s, num_steps):
        self.clock, self.ends_s, self.num_steps = clock, ends_s, num_steps

    def is_ready(self):
        return self.clock.now >= self.ends_s

    def result(self):
        self.clock.now = max(self.clock.now, self.ends_s)
        return LaunchResult(num_steps=self.num_steps)


class World:
    """A scheduler and a runner of one row: launches of up to 4 steps, as many as are told."""

    def __init__(self, monkeypatch, steps, overlaps=True):
        self.clock, self.steps, self.left = Clock(), list(steps), math.inf
        monkeypatch.setattr(pacing, "time", self.clock)
        self.device_free_s, self.started = 0.0, []
        self.core = EngineCore(self, self, max_total_tokens=1, overlaps=overlaps)

    def schedule(self):
        bucket = canvas.CanvasBucket(rows=1, tokens=64)
        return ScheduleBatch(rows=(), bucket=bucket, max_steps=4)

    def launch(self, batch):
        num_steps = self.steps.pop(0)
        begins_s = max(self.clock.now, self.device_free_s)
        self.device_free_s = begins_s + num_steps * STEP_S
        self.started.append(self.clock.now)
        return Launch(self.clock, self.device_free_s, num_steps)

    def steps_left(self, batch):
        return self.left

    def process_results(self, batch, result):
        return []

    def has_work(self):
        return True

    def stats(self):
        return types.SimpleNamespace(num_running=1, num_queued=0, token_usage=0.0)


def after_a_whole_launch(monkeypatch, next_steps):
    """Returns a world whose first launch of 4 steps has been read, with the next under way."""
    world = World(monkeypatch, [4, next_steps, 4])
    world.core.step()
    world.core.step()
    assert world.clock.now == pytest.approx(100 + 4 * STEP_S) and len(world.started) == 2
    return world


def test_without_an_expectation_the_next_launch_starts_at_once(monkeypatch):
    world = after_a_whole_launch(monkeypatch, next_steps=1)
    world.left = 2.1  # more than half of a launch's steps
    began = world.clock.now
    world.core.step()
    assert world.started[2:] == [began]


def test_a_launch_that_ends_as_expected_has_none_behind_it(monkeypatch):
    world = after_a_whole_launch(monkeypatch, next_steps=1)
    world.left = 0.8
    began = world.clock.now
    world.core.step()
    assert len(world.started) == 2
    assert began + STEP_S <= world.clock.now < began + 1.1 * STEP_S  # read as soon as it is there
    world.left = math.inf
    world.core.step()
    assert len(world.started) == 3


def test_a_launch_that_takes_longer_is_followed_before_it_ends(monkeypatch):
    world = after_a_whole_launch(monkeypatch, next_steps=4)
    world.left = 2.0
    began = world.clock.now
    world.core.step()
    assert began + 2 * STEP_S <= world.started[2] < began + 2.1 * STEP_S
    assert world.clock.now == pytest.approx(began + 4 * STEP_S)


def test_a_late_host_waits_no_longer_than_half_the_steps(monkeypatch):
    world = after_a_whole_launch(monkeypatch, next_steps=4)
    world.left = 2.0
    began = world.clock.now
    for late in (1.5, 0.0):  # delivering what the launch before has brought took so long
        world.clock.sleep(late * STEP_S)
        world.core.step()
        assert began + 2 * STEP_S <= world.started[-1] < began + 2.1 * STEP_S
        world.steps.append(4)
        began = world.clock.now
    world.clock.sleep(3 * STEP_S)
    at = world.clock.now
    world.core.step()
    assert world.started[-1] == at


def test_without_overlap_every_launch_is_read_at_once(monkeypatch):
    world = World(monkeypatch, [4, 1, 4], overlaps=False)
    world.left = 0.0
    for count in (1, 2, 3):
        world.core.step()
        assert len(world.started) == count


def test_a_launch_that_fails_while_it_is_waited_for_is_told(monkeypatch):
    world = after_a_whole_launch(monkeypatch, next_steps=1)
    world.left = 0.5

    def fail(self):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Launch, "result", fail)
    world.drop_kv = world.reset = lambda: None
    with pytest.raises(LaunchFailed, match="out of luck"):
        world.core.step()
    assert len(world.started) == 2 and world.core._in_flight is None


def test_the_pace_is_what_the_last_launch_of_this_stay_brought():
    rng = random.Random(3)
    made, shapes = build(32, 2, 1000, decode_steps=2)
    model = CanvasModel(32, shapes, rng)
    for i in range(12):
        one = random_request(rng, str(i))
        one.sampling = type(one.sampling)(dllm=one.sampling.dllm)
        one.eos_token_ids = ()
        made.add_request(one)
    num_known = num_rounds = 0
    while (batch := made.schedule()) is not None:
        num_rounds += 1
        if num_rounds % 6 == 5:  # they begin anew and report their earlier tokens again
            made.drop_kv()
            model.reset()
            assert all(one.stay is None for one in made.waiting)
            continue
        before = {row.request.request_id: len(row.request.output_ids) for row in batch.rows}
        result = model.launch(batch).result()
        made.process_results(batch, result)
        for row, found in zip(batch.rows, result.rows, strict=True):
            one = row.request
            if one not in made.running:
                continue
            new = len(one.output_ids) - before[one.request_id]
            left = one.max_new_tokens - len(one.output_ids)
            assert made.rows.steps_left(one) == pytest.approx(
                left * found.nfe / new if new else math.inf
            )
        if made.waiting:
            assert made.steps_left(batch) == math.inf
        else:
            lefts = [made.rows.steps_left(one) for one in made.running]
            assert made.steps_left(batch) == max(lefts, default=0)
            num_known += bool(lefts) and max(lefts) < math.inf
    assert num_known > 1
    assert made.steps_left(batch_of(canvas.CanvasBucket)) == 0  # nothing lives
    assert made.steps_left(batch_of(block.PrefillBucket)) == math.inf


def test_blocks_come_at_no_pace():
    made = hand_written.make()
    made.add_request(hand_written.ask("a", [7]))
    batch, _ = hand_written.round_of(made)
    assert batch.bucket.denoises and made.steps_left(batch) == math.inf


def test_a_request_that_is_not_in_the_launch_is_not_ended_by_it():
    rng = random.Random(4)
    made, shapes = build(32, 2, 1000, decode_steps=2)
    one = random_request(rng, "one")
    made.add_request(one)
    batch = made.schedule()
    one.stay.tokens_per_step = 1.0
    assert math.isfinite(made.steps_left(batch))
    assert made.steps_left(batch_of(canvas.CanvasBucket)) == math.inf


def batch_of(kind):
    """Returns a batch without rows."""
    bucket = kind(rows=1, tokens=PAGE)
    return ScheduleBatch(rows=(), bucket=bucket)
