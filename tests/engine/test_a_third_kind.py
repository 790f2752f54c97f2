"""A kind that nobody knows of: one device folder, one file of rows, one line; the laws hold.

Rows of it have no pages, a fixed number of steps, an output of each step and one at the end, all
of which can be computed by hand. They run through the real scheduler, engine core and runner.
"""

import random
import types

import jax.numpy as jnp
import numpy as np
import pytest
from support.toy_kind import device, rows

from jdllm import errors
from jdllm.device import facts
from jdllm.engine.core import EngineCore, LaunchFailed
from jdllm.engine.start import kinds
from jdllm.options import sampling_params
from jdllm.runner import model_runner
from jdllm.scheduler import request, scheduler
from jdllm.scheduler.rows import interface

CPU = facts.DeviceFacts(platform="cpu", device_kind="cpu")
ROWS, WEIGHT = 3, 5
# The one line.
KINDS = kinds.KINDS | {"toy": kinds.KindOfRows(rows=rows.ToyRows, device=device.build)}


def build(*, decode_steps=4, overlaps=True, folds=True):
    """Returns an engine core over a real runner."""
    config = interface.RowConfig(
        max_running_requests=ROWS,
        context_length=1,
        block_size=1,
        page_size=1,
        num_pages=0,
        prefill_token_budget=1,
        max_prefill_tokens=1,
        decode_steps=decode_steps,
        device=CPU,
    )
    made = KINDS["toy"].rows.build(config)
    options = types.SimpleNamespace(num_slots=ROWS, max_launch_steps=decode_steps)
    kind = KINDS["toy"].device(None, options, CPU)
    kind.folds = folds
    runner = model_runner.ModelRunner({"weight": jnp.int32(WEIGHT)}, kind, device=CPU)
    runner.compile(made.buckets())
    return EngineCore(scheduler.Scheduler(made), runner, max_total_tokens=1, overlaps=overlaps)


def ask(name, seed, steps):
    return request.Request(
        request_id=name,
        prompt_ids=[],
        sampling=sampling_params.SamplingParams(),
        max_new_tokens=steps,
        seed=seed,
    )


def alone(one):
    """Returns the vector after each step."""
    value, seen = np.full(device.WIDTH, one.seed, np.int32), []
    with np.errstate(over="ignore"):
        for step in range(1, one.max_new_tokens + 1):
            value = device.advance(value, np.int32(step)) + np.int32(WEIGHT)
            seen.append(value.tolist())
    return seen


class Client:
    """What requests are told; frames of a request that began anew come again."""

    def __init__(self):
        self.frames, self.products = {}, {}

    def take(self, commits):
        for commit in commits:
            name = commit.request.request_id
            assert name not in self.products, "told after its end"
            assert commit.new_token_ids == []
            mine = self.frames.setdefault(name, {})
            for frame in commit.frames:
                value = frame.value.tolist()
                assert mine.setdefault(frame.step, value) == value
            if commit.finish is not None:
                self.products[name] = commit.product.tolist()


def random_asks(rng, count):
    return [ask(str(i), rng.randrange(2**31), rng.choice([1, 2, 3, 9, 20])) for i in range(count)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("folds", [False, True])
def test_together_is_alone_whatever_arrives_and_leaves(overlaps, decode_steps, folds):
    rng = random.Random(repr((overlaps, decode_steps, folds)))
    core = build(decode_steps=decode_steps, overlaps=overlaps, folds=folds)
    asks, client, aborted = random_asks(rng, 30), Client(), set()
    todo = list(asks)
    while todo or core.has_work:
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            if todo:
                core.add([todo.pop()])
        core.runner.begin_round()
        if rng.random() < 0.1 and core.requests:
            name = rng.choice(sorted(core.requests))
            core.abort(name)
            core.runner.interrupt()
            aborted.add(name)
        if rng.random() < 0.1:  # preempted: running rows begin anew
            core.scheduler.drop_kv()
        client.take(core.step())
        slots = [one.stay.slot for one in core.scheduler.running] + core.scheduler.live.free_slots
        assert sorted(slots) == list(range(ROWS))
        assert all(one.stay is None for one in core.scheduler.waiting)
    assert aborted and core.scheduler.stats().total_preemptions > 0
    for one in asks:
        expected, frames = alone(one), client.frames.get(one.request_id, {})
        assert all(expected[step - 1] == value for step, value in frames.items())
        if one.request_id not in aborted:
            assert sorted(frames) == list(range(1, one.max_new_tokens + 1)), "a frame was lost"
            assert client.products[one.request_id] == expected[-1]
    assert core.scheduler.stats().token_usage == 0.0 and not core.requests


def test_a_failed_launch_takes_its_rows_with_it_and_no_other(monkeypatch):
    core, client = build(), Client()
    first, later = ask("first", 1, 9), ask("later", 2, 9)
    core.add([first])
    launch = core.runner.launch
    monkeypatch.setattr(core.runner, "launch", lambda batch: 1 / 0)
    with pytest.raises(LaunchFailed) as failed:
        core.step()
    assert [one.request_id for one in failed.value.requests] == ["first"]
    monkeypatch.setattr(core.runner, "launch", launch)
    core.add([later])
    while core.has_work:
        client.take(core.step())
    assert client.products == {"later": alone(later)[-1]}


def test_nothing_is_started_behind_a_launch_that_ends_all_rows():
    core, client = build(decode_steps=4), Client()
    core.add([ask("one", 7, 5)])
    while core.has_work:
        client.take(core.step())
    assert core.counters.decode_launches == 2, "one of four steps, one of the last"
    assert core.counters.denoising_steps == 5


def test_what_could_never_run_is_refused():
    core = build()
    with pytest.raises(errors.RequestError, match="steps"):
        core.add([ask("none", 1, 0)])
    assert not core.has_work and not core.requests
