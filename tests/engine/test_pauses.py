"""A round may have nothing to launch although requests are live: the engine sleeps, and wakes."""

import itertools
import queue
import random
import threading
import time
import types

import pytest
from support import hash_model
from support.image_fake import SMALL, alone, ask, build

from jdllm.engine.core import EngineCore, LaunchFailed
from jdllm.engine.loop import EngineLoop
from jdllm.scheduler.batch import LaunchResult, Pause, ScheduleBatch
from jdllm.scheduler.rows.image import rows
from jdllm.scheduler.rows.image.buckets import BeginBucket

DELAY_S = 0.4


class Counted:
    """Counts the rounds of an engine core."""

    def __init__(self, core):
        self.rounds, step = 0, core.step

        def counted():
            self.rounds += 1
            return step()

        core.step = counted


def products_of(events, count):
    found = {}
    while len(found) < count:
        name, event = events.get(timeout=30)
        if event.commit.finish is not None:
            found[name] = event.commit.product
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_start_that_is_held_sleeps_and_an_arrival_wakes_it(overlaps):
    core, device = build(random.Random(0), delay_s=DELAY_S, overlaps=overlaps)
    rounds, events = Counted(core), queue.SimpleQueue()
    engine = EngineLoop(core)
    began = time.monotonic()
    asks = [ask(2, seed=n, prompt=(n + 1,), arrival_s=began) for n in range(2)]
    for one in asks:
        engine.submit([one], lambda name, event: events.put((name, event))).result(timeout=30)
        time.sleep(DELAY_S / 4)
    products = products_of(events, 2)
    took = time.monotonic() - began
    engine.stop()
    assert products == {one.request_id: alone(one)[1] for one in asks}
    assert [b.bucket.name for b in device.trace] == ["encode", "encode", "step", "step", "decode"]
    assert took >= DELAY_S
    assert rounds.rounds < 20, "the engine asked again and again"


def test_missing_programs_are_asked_for_now_and_then():
    core, device = build(random.Random(0))
    one, events, is_compiled = ask(2), queue.SimpleQueue(), threading.Event()
    programs = core.scheduler.rows.programs
    programs.is_ready = lambda bucket: bucket.name != "step" or is_compiled.is_set()
    rounds = Counted(core)
    engine = EngineLoop(core)
    engine.submit([one], lambda name, event: events.put((name, event))).result(timeout=30)
    time.sleep(0.3)
    assert not device.trace  # a request holds no place before it has all that it needs
    assert rounds.rounds <= 0.3 / rows.PROGRAM_POLL_S + 20
    is_compiled.set()
    assert products_of(events, 1) == {one.request_id: alone(one)[1]}
    engine.stop()


def test_an_abort_while_the_start_is_held_ends_at_once():
    core, _ = build(random.Random(0), delay_s=60.0)
    engine = EngineLoop(core)
    one, events = ask(2, arrival_s=time.monotonic()), queue.SimpleQueue()
    engine.submit([one], lambda name, event: events.put((name, event))).result(timeout=30)
    time.sleep(0.05)
    began = time.monotonic()
    assert engine.abort_only([one]).result(timeout=30) == 1
    assert events.get(timeout=30)[1].commit.finish.kind == "abort"
    engine.stop()
    assert time.monotonic() - began < 10


class World:
    """A scheduler whose launches are those of a list, and a runner that is done at once."""

    def __init__(self, plans, overlaps):
        self.plans, self.launched = list(plans), 0
        self.core = EngineCore(self, self, max_total_tokens=1, overlaps=overlaps)

    def schedule(self):
        return self.plans.pop(0)

    def launch(self, batch):
        self.launched += 1
        return hash_model.Done(LaunchResult(num_steps=1))

    def steps_left(self, batch):
        return 1.0

    def process_results(self, batch, result):
        return []

    def has_work(self):
        return bool(self.plans)

    def stats(self):
        return types.SimpleNamespace(num_running=1, num_queued=0, token_usage=0.0)


def batch():
    bucket = BeginBucket(height=64, width=64)
    return ScheduleBatch(rows=(), bucket=bucket)


def test_while_a_launch_is_in_flight_its_results_are_the_pause():
    pauses = [Pause(seconds=s) for s in (float("inf"), 0.25, 0.125)]
    world = World([batch(), *pauses, batch(), batch()], overlaps=True)
    seen = []
    for _ in itertools.repeat(None, 6):
        world.core.step()
        seen.append((world.launched, world.core.pause_s))
    assert seen == [(1, 0.0), (1, 0.0), (1, 0.25), (1, 0.125), (2, 0.0), (3, 0.0)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_waiting_for_results_that_nobody_computes_is_a_fault(overlaps):
    world = World([Pause(seconds=float("inf"))], overlaps)
    with pytest.raises(AssertionError, match="no launch"):
        world.core.step()


def test_rows_that_never_pause_must_have_a_launch():
    made, _ = hash_model.build(hash_model.B, True, "fcfs", 64, 2)
    made.add_request(hash_model.random_request(random.Random(0), "one"))
    made.rows.plan = lambda: None
    with pytest.raises(AssertionError, match="no launch"):
        made.schedule()


def test_rows_that_cannot_halve_end_without_memory():
    made, _ = hash_model.build(hash_model.B, True, "fcfs", 64, 2)
    one = hash_model.random_request(random.Random(0), "one")
    model = hash_model.PagedModel("persist", 64, hash_model.B)
    core = EngineCore(made, model, max_total_tokens=64)
    core.add([one])
    model.reset = lambda: None
    model.launch = lambda batch: hash_model.Done(RuntimeError("RESOURCE_EXHAUSTED: no memory"))
    with pytest.raises(LaunchFailed) as failed:
        core.step()
    assert failed.value.requests == [one]


def test_images_are_not_halved_for_other_faults():
    core, _ = build(random.Random(0), fault=lambda batch: RuntimeError("INTERNAL: a fault"))
    asks = [ask(2, size=SMALL, prompt=(n,)) for n in range(2)]
    core.add(asks)
    with pytest.raises(LaunchFailed) as failed:
        while True:
            core.step()
    assert failed.value.requests == asks
