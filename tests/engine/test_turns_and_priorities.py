"""Calls take turns, and priorities decide who goes first, through the engine's own parts.

The scheduler and what makes the requests are real, the model computable (`hash_engine`).
"""

import asyncio
import itertools
import math

import pytest
from support import hash_engine
from support.hash_model import B

from jdllm import errors
from jdllm.engine import input_processor
from jdllm.options import sampling_params

PARAMS = sampling_params.SamplingParams(max_new_tokens=2 * B, seed=5, ignore_eos=True)
PRIORITIES = {"enable_priority_scheduling": True}


def order_of(calls, **options):
    """Runs calls, which are (number of prompts, n, priority), and returns who begins when.

    All are queued before any runs. A call is named by its place.
    """
    built = hash_engine.built(**options)
    inputs, begun = input_processor.InputProcessor(built), []
    for place, (count, n, priority) in enumerate(calls):
        params = sampling_params.SamplingParams(max_new_tokens=2 * B, seed=5, n=n)
        choices = inputs.choices([[4]] * count, [params] * count, priority=priority)
        asked = [choice.request for choice in choices.values()]
        begun += [(one, place) for one in asked]
        built.core.add(asked, is_bounded=False)
    while built.core.has_work:
        built.core.step()
    return [place for _, place in sorted(begun, key=lambda pair: pair[0].admission)]


def test_prompts_and_choices_of_a_call_take_turns_with_other_calls():
    assert order_of([(40, 1, None), (1, 1, None)])[:3] == [0, 1, 0]
    assert order_of([(1, 40, None), (3, 2, None), (1, 1, None)])[:6] == [0, 1, 2, 0, 1, 0]
    assert order_of([(1, 1, None)] * 12) == list(range(12))


@pytest.mark.parametrize("lowest_first", [False, True])
def test_the_best_priority_goes_first_and_none_comes_last(lowest_first):
    calls = [(3, 1, None), (2, 1, -7), (2, 1, 2**63 - 1), (1, 1, 0), (2, 1, -7)]
    found = order_of(calls, **PRIORITIES, schedule_low_priority_values_first=lowest_first)
    runs = [name for name, _ in itertools.groupby(found)]
    best_first = [1, 4, 1, 4, 3, 2, 0] if lowest_first else [2, 3, 1, 4, 1, 4, 0]
    assert runs == best_first


CALLS = {
    "generate": lambda engine, p: engine.generate(None, PARAMS, input_ids=[4], priority=p),
    "generate, streamed": lambda engine, p: list(
        engine.generate(None, PARAMS, input_ids=[4], priority=p, stream=True)
    ),
    "async_generate": lambda engine, p: asyncio.run(
        engine.async_generate(None, PARAMS, input_ids=[4], priority=p)
    ),
    "iterate": lambda engine, p: list(engine.iterate([[4]], PARAMS, priority=p)),
    "stream": lambda engine, p: asyncio.run(collected(engine.stream([[4]], PARAMS, priority=p))),
}


async def collected(events):
    return [one async for one in events]


@pytest.mark.parametrize("name", CALLS)
def test_each_way_into_the_engine_takes_a_priority(name, monkeypatch):
    with hash_engine.make_engine(**PRIORITIES) as engine:
        seen = []
        core = engine._built.core
        add = core.add
        monkeypatch.setattr(core, "add", lambda asked, **kw: (seen.extend(asked), add(asked, **kw)))
        for priority in (7, None):
            CALLS[name](engine, priority)
        assert [one.priority_class for one in seen] == [-7, math.inf]
        for wrong in (2**63, -(2**63) - 1, True, "1", 1.0):
            with pytest.raises(errors.RequestError, match="integer") as caught:
                CALLS[name](engine, wrong)
            assert caught.value.param == "priority"


@pytest.mark.parametrize("name", CALLS)
def test_without_priority_scheduling_only_the_neutral_priority_passes(name):
    with hash_engine.make_engine() as engine:
        for neutral in (None, 0):
            CALLS[name](engine, neutral)
        with pytest.raises(errors.RequestError, match="--enable-priority-scheduling") as caught:
            CALLS[name](engine, -1)
        assert caught.value.param == "priority"


def test_the_direction_of_priorities_alone_is_refused():
    with pytest.raises(errors.ConfigError, match="needs enable_priority_scheduling"):
        hash_engine.built(schedule_low_priority_values_first=True)
