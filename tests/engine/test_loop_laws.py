"""The engine thread under random clients: arrivals, aborts, faults; every output as if alone.

The runner is the computable model of `hash_model`, so a lost event, a page freed too
early or K,V that survived a fault changes some output.
"""

import collections
import queue
import random
import threading

import pytest
from hash_model import CONTEXT, B, PagedModel, alone, build, random_request

from jdllm import errors
from jdllm.engine import core, loop

REQUESTS_PER_CLIENT = 25
CLIENTS = 4


class FaultyModel(PagedModel):
    """Fails at random launches, after the pool was touched, and loses the pool."""

    def __init__(self, *args, rng, fault_rate):
        super().__init__(*args)
        self.rng, self.fault_rate, self.faults = rng, fault_rate, 0

    def execute(self, batch):
        results = super().execute(batch)
        if self.rng.random() < self.fault_rate:
            self.faults += 1
            self.store[:] = self.rng.getrandbits(63)
            raise RuntimeError("device fault")
        return results

    def reset_pool(self):
        self.store[:] = 0


def sink_to(events):
    return lambda name: lambda event: events.put((name, event))


def client(engine, requests, rng, outcomes):
    """Submits requests one after another or overlapping, aborts some, records every event."""
    events = queue.SimpleQueue()
    waiting, todo = {}, list(requests)
    while todo or waiting:
        if todo and (not waiting or rng.random() < 0.5):
            one = todo.pop()
            engine.submit([one], sink_to(events)).result(timeout=60)
            waiting[one.request_id] = one
            if rng.random() < 0.1:
                engine.abort(one.request_id.__eq__)
            continue
        name, event = events.get(timeout=60)
        if isinstance(event, loop.FaultEvent):
            outcomes[name] = ("fault", None)
            waiting.pop(name)
        elif event.output.finish is not None:
            ids = event.output.request.output_ids[: event.num_output]
            outcomes[name] = (event.output.finish.kind, ids)
            waiting.pop(name)


@pytest.mark.parametrize("fault_rate", [0.0, 0.01], ids=["healthy", "faulty"])
@pytest.mark.parametrize("kind", ["persist", "edit"])
def test_random_clients_get_what_they_would_get_alone(kind, fault_rate):
    rng = random.Random(f"{kind} {fault_rate}")
    num_pages = CONTEXT // B + 8
    made, _ = build(B, True, "fcfs", num_pages, 6)
    model = FaultyModel(kind, num_pages, B, rng=rng, fault_rate=fault_rate)
    engine = loop.EngineLoop(core.EngineCore(made, model, max_total_tokens=num_pages * B))
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
        engine.submit([good, bad], lambda name: lambda event: None).result(timeout=10)
    assert engine.call(lambda: not made.has_work()).result(timeout=10)
    engine.stop()
    with pytest.raises(errors.EngineStopped):
        engine.submit([good], lambda name: lambda event: None)
