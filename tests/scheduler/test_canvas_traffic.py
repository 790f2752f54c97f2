"""The law for canvases: whatever the traffic, every request gets the tokens it would get alone."""

import collections
import random

import numpy as np
import pytest
from support.canvas_hash_model import (
    CONTEXT,
    PAGE,
    CanvasModel,
    build,
    expected,
    random_request,
    token_of,
)
from support.hash_model import ends_at

from jdllm.engine.core import EngineCore, LaunchFailed
from jdllm.scheduler.rows import canvas

NUM_REQUESTS = 60
CONTEXT_PAGES = CONTEXT // PAGE


def check(made):
    """Pages and slots are held once, by running requests; who came first runs first."""
    pages = [page for one in made.running for page in one.held.pages]
    assert sorted(pages) == np.flatnonzero(made.pages.allocator.is_used).tolist()
    for one in made.waiting:
        assert one.stay is None
    slots = [one.held.slot for one in made.running] + made.live.free_slots
    assert sorted(slots) == list(range(len(slots)))
    if made.running and made.waiting:
        assert made.running[-1].arrival < next(iter(made.waiting)).arrival, "one overtook another"


class Traffic:
    """Random arrivals, aborts and losses of the pool; results are read late."""

    def __init__(self, made, model, rng, launches_ahead):
        self.made, self.model, self.rng, self.launches_ahead = made, model, rng, launches_ahead
        self.streamed, self.finished = collections.defaultdict(list), {}
        self.stays = collections.defaultdict(list)
        self.aborted = set()
        self.in_flight = collections.deque()

    def serve(self, todo, *, loss=0.0):
        todo, live, rounds = list(todo), [], 0
        while todo or self.made.has_work() or self.in_flight:
            for _ in range(self.rng.choice([0, 0, 1, 2, 7])):
                if todo:
                    live.append(todo.pop())
                    self.made.add_request(live[-1])
            batch = self.made.schedule()
            check(self.made)
            if batch is not None:
                rounds += 1
                self.start(batch)
            if live and self.rng.random() < 0.01:
                victim = self.rng.choice(live).request_id
                if self.made.abort(victim):
                    self.aborted.add(victim)
            if self.rng.random() < loss:
                self.in_flight.clear()
                self.made.drop_kv()
                self.model.reset()
            if self.in_flight and (batch is None or len(self.in_flight) > self.launches_ahead):
                self.read()
            assert rounds < 20_000, self.made.stats()
        return rounds

    def start(self, batch):
        for row in batch.rows:
            if row.is_fresh:
                one = row.request
                self.stays[one.request_id].append((one.num_preemptions, len(one.output_ids)))
        free = ~self.made.pages.allocator.is_used
        self.model.store[free] = self.rng.getrandbits(62)
        self.in_flight.append((batch, self.model.launch(batch)))

    def read(self):
        batch, launch = self.in_flight.popleft()
        for output in self.made.process_results(batch, launch.result()):
            name = output.request.request_id
            assert name not in self.aborted and name not in self.finished
            self.streamed[name] += output.new_token_ids
            if output.finish is not None:
                self.finished[name] = output.finish


@pytest.mark.parametrize("loss", [0.0, 0.05], ids=["undisturbed", "pool lost"])
@pytest.mark.parametrize("decode_steps,launches_ahead", [(1, 0), (4, 1), (3, 3)])
@pytest.mark.parametrize(
    "rows,num_pages,tokens",
    [(1, 8, 8), (6, CONTEXT_PAGES + 1, 1000), (6, 100, 100), (8, 100, 1000)],
    ids=["one row", "few pages", "few tokens", "roomy"],
)
def test_every_request_gets_the_tokens_it_gets_alone(
    rows, num_pages, tokens, decode_steps, launches_ahead, loss
):
    rng = random.Random(repr((rows, num_pages, tokens, decode_steps, launches_ahead, loss)))
    made, shapes = build(
        num_pages, rows, tokens, decode_steps=decode_steps, launches_ahead=launches_ahead
    )
    traffic = Traffic(made, CanvasModel(num_pages, shapes, rng), rng, launches_ahead)
    todo = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    traffic.serve(todo, loss=loss)
    for one in todo:
        name = one.request_id
        got = traffic.streamed[name]
        stays = traffic.stays[name]
        assert got == one.output_ids and len(stays) <= 1 + one.num_preemptions
        whole = expected(one, stays) if stays else []
        assert got == whole[: len(got)], "what was committed has changed"
        assert one.output_logprobs == [-float(token) for token in got]
        if name not in traffic.aborted:
            assert len(got) == ends_at(whole, one) == traffic.finished[name].finished_len
            assert one.nfe >= 1 and len(one.output_steps) == len(got)
    assert set(traffic.finished) | traffic.aborted == {one.request_id for one in todo}
    assert made.stats().num_used_pages == 0
    assert made.pages.allocator.num_free == num_pages
    assert (made.stats().total_preemptions > 0) == (loss > 0)


def test_a_failed_launch_takes_its_rows_with_it_and_no_other():
    for overlaps in (False, True):
        rng = random.Random(5)
        made, shapes = build(32, 3, 1000, decode_steps=2)
        model = CanvasModel(32, shapes, rng)
        model.fails = {4}
        core = EngineCore(made, model, max_total_tokens=32 * PAGE, overlaps=overlaps)
        todo = [random_request(rng, str(i)) for i in range(12)]
        core.add(todo)
        failed = set()
        while core.has_work:
            try:
                core.step()
            except LaunchFailed as error:
                failed |= {one.request_id for one in error.requests}
        assert failed
        for one in todo:
            if one.request_id not in failed:
                start, output = len(one.prompt_ids), one.output_ids
                for place, token in enumerate(output):
                    written = {token_of(one, start + place, epoch) for epoch in range(3)}
                    assert token in written | {one.given.get(place)}
                assert ends_at(output, one) == len(output)
        assert made.stats().num_used_pages == 0


def test_a_short_request_is_answered_while_a_long_one_of_its_batch_goes_on():
    rng = random.Random(1)
    made, shapes = build(32, 2, 1000, decode_steps=2)
    model = CanvasModel(32, shapes, rng)
    long, short = random_request(rng, "long"), random_request(rng, "short")
    for one, wanted in ((long, 40), (short, 2)):
        one.prompt_ids, one.suffix_ids, one.given, one.eos_token_ids = [5], [], {}, ()
        one.sampling = type(one.sampling)(dllm=one.sampling.dllm)
        one.max_new_tokens = wanted
        made.add_request(one)
    ends = {}
    for round_number in range(200):
        batch = made.schedule()
        if batch is None:
            break
        assert isinstance(batch.bucket, canvas.CanvasBucket)
        for output in made.process_results(batch, model.launch(batch).result()):
            if output.finish is not None:
                ends[output.request.request_id] = (round_number, output.num_output)
    assert ends["short"][1] == 2 and ends["long"][1] == 40
    assert ends["short"][0] < ends["long"][0]
    assert short.nfe < long.nfe
