"""The engine thread under random clients: arrivals, aborts, faults; every output as if alone.

The runner is the computable model of `hash_model`, so a lost event, a page freed too
early or K,V that survived a fault changes some output.
"""

import collections
import functools
import queue
import random
import threading

import pytest
from support import hash_model, work
from support.hash_model import CONTEXT, B, PagedModel, alone, build, random_request

from jdllm import errors
from jdllm.engine import core, loop, stats
from jdllm.options import sampling_params

REQUESTS_PER_CLIENT = 25
CLIENTS = 4


class FaultyModel(PagedModel):
    """Fails at random launches, after the pool was touched, and loses the pool."""

    def __init__(self, *args, rng, fault_rate):
        super().__init__(*args, interrupts=rng)
        self.rng, self.fault_rate, self.faults, self.lost = rng, fault_rate, 0, False

    def launch(self, batch):
        if self.lost:  # the pool of a failed launch went into this one
            return hash_model.Done(RuntimeError("the pool is lost"))
        launch = super().launch(batch)
        if self.rng.random() < self.fault_rate:
            self.faults += 1
            self.store[:] = self.rng.getrandbits(63)
            self.blocks.clear()
            fault = RuntimeError("device fault")
            if self.rng.random() < 0.5:
                raise fault
            self.lost = True
            return hash_model.Done(fault)
        return launch

    def reset(self):
        self.store[:] = 0
        self.lost = False


def client(engine, requests, rng, outcomes):
    """Submits requests one after another or overlapping, aborts some, records every event."""
    events = queue.SimpleQueue()
    waiting, todo = {}, list(requests)
    while todo or waiting:
        if todo and (not waiting or rng.random() < 0.5):
            one = todo.pop()
            engine.submit([one], lambda name, event: events.put((name, event))).result(timeout=60)
            waiting[one.request_id] = one
            if rng.random() < 0.1:
                engine.abort_only([one])
            continue
        name, event = events.get(timeout=60)
        if isinstance(event, loop.FaultEvent):
            outcomes[name] = ("fault", None)
            waiting.pop(name)
        elif event.commit.finish is not None:
            ids = event.commit.request.output_ids[: event.commit.num_output]
            outcomes[name] = (event.commit.finish.kind, ids)
            waiting.pop(name)


@pytest.mark.parametrize("fault_rate", [0.0, 0.03], ids=["healthy", "faulty"])
@pytest.mark.parametrize("kind", ["persist", "edit"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 65))]
)
def test_random_clients_get_what_they_would_get_alone(kind, fault_rate, overlaps, seed):
    rng = random.Random(f"{kind} {fault_rate} {seed}")
    num_pages = CONTEXT // B + 8
    made, _ = build(B, True, "fcfs", num_pages, 6, 1 + 2 * overlaps, int(overlaps))
    model = FaultyModel(kind, num_pages, B, rng=rng, fault_rate=fault_rate)
    engine = loop.EngineLoop(
        core.EngineCore(made, model, max_total_tokens=num_pages * B, overlaps=overlaps)
    )
    outcomes, threads, every = {}, [], []
    for c in range(CLIENTS):
        requests = [random_request(rng, f"{c}-{i}") for i in range(REQUESTS_PER_CLIENT)]
        every += requests
        seed = random.Random(rng.random())
        threads.append(threading.Thread(target=client, args=(engine, requests, seed, outcomes)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "an event never came"
    engine.stop()
    assert set(outcomes) == {one.request_id for one in every}
    kinds = collections.Counter(kind for kind, _ in outcomes.values())
    assert kinds["stop"] + kinds["length"] > 20 and kinds["abort"] > 0
    assert model.num_asked > kinds["abort"]  # and once more to stop
    assert (kinds["fault"] > 0) == (model.faults > 0) == (fault_rate > 0)
    for one in every:
        end, ids = outcomes[one.request_id]
        if end != "fault":
            expected, _ = alone(kind, one)
            assert ids == (expected[: len(ids)] if end == "abort" else expected)
    assert made.stats().num_used_pages == 0 and made.flush_cache()
    assert made.pages.allocator.num_free == num_pages


def test_one_refused_choice_refuses_all_and_nothing_stays():
    made, _ = build(B, True, "fcfs", CONTEXT // B, 2)
    model = FaultyModel("persist", CONTEXT // B, B, rng=random.Random(0), fault_rate=0.0)
    engine = loop.EngineLoop(core.EngineCore(made, model, max_total_tokens=CONTEXT))
    rng = random.Random(1)
    good, bad = random_request(rng, "good"), random_request(rng, "bad")
    bad.prompt_ids = [1] * (CONTEXT + 1)
    with pytest.raises(errors.RequestTooLong):
        engine.submit([good, bad], lambda name, event: None).result(timeout=60)
    assert engine.call(lambda: not made.has_work()).result(timeout=60)
    engine.stop()
    with pytest.raises(errors.EngineStopped):
        engine.submit([good], lambda name, event: None)


def test_a_request_whose_own_processing_fails_harms_no_other():
    made, _ = build(B, True, "fcfs", 2 * CONTEXT // B, 4)

    def detokenize(ids):
        raise OverflowError("a detokenizer's own fault")

    made.rows._detokenize = detokenize
    model = FaultyModel("persist", 2 * CONTEXT // B, B, rng=random.Random(0), fault_rate=0.0)
    engine = loop.EngineLoop(core.EngineCore(made, model, max_total_tokens=CONTEXT))
    rng, events = random.Random(3), queue.SimpleQueue()
    bad, good = random_request(rng, "bad"), random_request(rng, "good")
    bad.sampling = sampling_params.SamplingParams(stop=["x"])
    good.sampling = sampling_params.SamplingParams()
    engine.submit([bad, good], lambda name, event: events.put((name, event))).result(timeout=60)
    ends = {}
    while len(ends) < 2:
        name, event = events.get(timeout=60)
        if event.commit.finish is not None:
            ends[name] = event.commit
    assert ends["bad"].finish.kind == "abort" and "OverflowError" in ends["bad"].finish.message
    assert good.output_ids == alone("persist", good)[0]
    assert made.stats().num_used_pages == 0
    engine.stop()


def test_events_say_what_was_true_when_they_were_made():
    made, _ = build(B, True, "fcfs", CONTEXT // B, 2)
    model = FaultyModel("persist", CONTEXT // B, B, rng=random.Random(0), fault_rate=0.0)
    engine = loop.EngineLoop(core.EngineCore(made, model, max_total_tokens=CONTEXT))
    one = random_request(random.Random(5), "slow")
    one.prompt_ids, one.max_new_tokens = [4] * B, 5 * B
    one.sampling = sampling_params.SamplingParams(ignore_eos=True)
    events = queue.SimpleQueue()
    engine.submit([one], lambda name, event: events.put(event)).result(timeout=60)
    seen = []
    while not seen or seen[-1].commit.finish is None:
        seen.append(events.get(timeout=60))
    engine.stop()
    assert [event.commit.num_blocks for event in seen] == [1, 2, 3, 4, 5]
    forwards = [event.commit.nfe for event in seen]
    assert forwards == sorted(set(forwards)) and forwards[-1] == one.nfe


def test_leaving_costs_a_caller_the_same_however_many_requests_are_live():
    """A client that leaves is a moment of the event loop, for which all others wait."""
    costs = {}
    for count in (4, 400):
        made, _ = build(B, True, "fcfs", CONTEXT // B, 2)
        model = FaultyModel("persist", CONTEXT // B, B, rng=random.Random(0), fault_rate=0.0)
        engine = loop.EngineLoop(core.EngineCore(made, model, max_total_tokens=CONTEXT))
        is_held = threading.Barrier(2)
        engine.call(lambda is_held=is_held: is_held.wait(60) + is_held.wait(60))
        is_held.wait(60)
        requests = [random_request(random.Random(i), f"{i}") for i in range(count)]
        engine.core.add(requests)  # the engine's thread is held
        leaves = [functools.partial(engine.abort_only, [requests[-1]])]
        leaves.append(functools.partial(engine.abort, ["1", "unknown"]))
        costs[count] = [work.bytecodes(leave) for leave in leaves]
        is_held.wait(60)
        left = engine.call(lambda engine=engine: set(engine.core.requests)).result(timeout=60)
        assert left.isdisjoint({"1", requests[-1].request_id})
        assert engine.abort().result(timeout=60) <= count - 2 and not engine.core.requests
        engine.stop()
    assert costs[4] == costs[400]


def test_throughput_is_a_rate_over_the_window():
    rate = stats.Throughput(window_s=100.0)
    assert rate.per_second() == 0.0
    rate._created_s -= 50.0  # as if the engine had run for 50 s
    rate.add(100)
    assert rate.per_second() == pytest.approx(2.0, rel=0.01)
