"""A list of prompts is one submission: all of it runs or none, and each gets what it gets alone.

The engine is real, the model computable (`support/hash_engine.py`).
"""

import asyncio
import contextlib
import time

import pytest
from support import hash_engine
from support.hash_model import CONTEXT, B

from jdllm import errors
from jdllm.engine import input_processor
from jdllm.options import sampling_params

PROMPTS = [[4] * B, [5] * (B + 1), [6] * 3]
PARAMS = sampling_params.SamplingParams(max_new_tokens=3 * B, seed=5, ignore_eos=True, n=2)


@pytest.fixture
def engine():
    with hash_engine.make_engine() as running:
        yield running
        running._built.runner.go_on()


async def collected(events):
    async with contextlib.aclosing(events):
        return [generation async for generation in events]


async def while_stepping(model, work):
    """Returns what `work` returns, launch after launch of a model that holds."""
    task = asyncio.ensure_future(work)
    while not task.done():
        model.release_one()
        await asyncio.sleep(0.01)
    return await task


def finals(events):
    return {
        (one.prompt_index, one.index): one.output_ids
        for one in events
        if one.finish_reason is not None
    }


def alone(prompts, rows):
    return {
        (i, choice): hash_engine.expected(prompt, one, choice)
        for i, (prompt, one) in enumerate(zip(prompts, rows, strict=True))
        for choice in range(one.n)
    }


def assert_nothing_ran(engine):
    assert hash_engine.num_requests(engine) == 0
    assert engine._built.runner.num_launches == 0
    assert engine.flush_cache()


@pytest.mark.parametrize("is_async", [False, True])
def test_each_prompt_of_a_list_gets_what_it_gets_alone(engine, is_async):
    one = sampling_params.SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True)
    for params, rows in ((PARAMS, [PARAMS] * 3), ([PARAMS, one, one], [PARAMS, one, one])):
        events = (
            asyncio.run(collected(engine.stream(PROMPTS, params)))
            if is_async
            else list(engine.iterate(PROMPTS, params))
        )
        assert finals(events) == alone(PROMPTS, rows)


def test_the_events_of_a_list_interleave_and_name_their_prompt(engine):
    params = sampling_params.SamplingParams(max_new_tokens=3 * B, seed=5, ignore_eos=True)
    ids = ["x", "y"]
    events = asyncio.run(collected(engine.stream(PROMPTS[:2], params, request_ids=ids)))
    first = {i: min(n for n, one in enumerate(events) if one.prompt_index == i) for i in (0, 1)}
    last = {i: max(n for n, one in enumerate(events) if one.prompt_index == i) for i in (0, 1)}
    assert max(first.values()) < min(last.values())
    for i, prompt in enumerate(PROMPTS[:2]):
        mine = [one for one in events if one.prompt_index == i]
        assert {one.request_id for one in mine} == {ids[i]}
        assert sum((one.delta_ids for one in mine), []) == hash_engine.expected(prompt, params)
        assert [one.finish_reason is None for one in mine] == [True] * (len(mine) - 1) + [False]


def test_generate_and_async_generate_keep_the_order_of_the_list(engine):
    wanted = [ids for _, ids in sorted(alone(PROMPTS, [PARAMS] * 3).items())]
    answers = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    assert [answer["output_ids"] for answer in answers] == wanted
    work = engine.async_generate(input_ids=PROMPTS, sampling_params=PARAMS)
    assert [answer["output_ids"] for answer in asyncio.run(work)] == wanted
    parts = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, stream=True)
    last = {part["index"]: (part["prompt_index"], part["output_ids"]) for part in parts}
    assert last == {i: (i // 2, ids) for i, ids in enumerate(wanted)}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_refused_prompt_refuses_the_list_and_nothing_runs(engine, place):
    prompts = [*PROMPTS]
    prompts[place] = [4] * CONTEXT
    with pytest.raises(errors.RequestTooLong):
        asyncio.run(collected(engine.stream(prompts, PARAMS)))
    with pytest.raises(errors.RequestTooLong):
        engine.iterate(prompts, PARAMS)
    with pytest.raises(errors.RequestTooLong):
        engine.generate(input_ids=prompts, sampling_params=PARAMS)
    prompts[place] = [99]
    with pytest.raises(errors.RequestError, match="99, not a token id"):
        asyncio.run(collected(engine.stream(prompts, PARAMS)))
    assert_nothing_ran(engine)


def test_a_list_that_can_never_fit_is_refused_before_anything_is_built(engine, monkeypatch):
    places = hash_engine.ROWS + hash_engine.QUEUE
    params = sampling_params.SamplingParams(max_new_tokens=2, seed=1)
    fits = asyncio.run(collected(engine.stream([[4]] * places, params)))
    assert len(finals(fits)) == places

    def build(**_):
        raise AssertionError("a request was built")

    monkeypatch.setattr(input_processor, "Request", build)
    monkeypatch.setattr(input_processor.InputProcessor, "choices", build)
    for prompts, n in (([[4]] * (places + 1), 1), ([[4]] * 2, places)):
        rows = [sampling_params.SamplingParams(max_new_tokens=2, n=n)] * len(prompts)
        with pytest.raises(errors.RequestError, match=f"allow {places} together") as raised:
            engine.stream(prompts, rows)
        assert f"a list of {len(prompts)} prompts with {n * len(prompts)} choices" in str(
            raised.value
        )
        assert (raised.value.param, raised.value.status) == ("prompt", 400)


def test_a_list_that_finds_no_room_now_waits_for_nobody(engine):
    """What could fit but does not is a full queue, and none of it stays in the queue."""
    model = engine._built.runner
    busy = [[4]] * (hash_engine.ROWS + hash_engine.QUEUE)

    async def refused():
        model.hold()
        first = engine.stream(busy, sampling_params.SamplingParams(max_new_tokens=4 * B))
        await while_stepping(model, anext(first))
        with pytest.raises(errors.QueueFull):
            await while_stepping(model, collected(engine.stream(PROMPTS, PARAMS)))
        await first.aclose()

    asyncio.run(asyncio.wait_for(refused(), 60))
    assert hash_engine.num_requests(engine) == len(busy)


def test_closing_a_stream_aborts_all_its_prompts(engine):
    model = engine._built.runner

    async def leave_after_the_first_event():
        model.hold()
        stream = engine.stream(PROMPTS, PARAMS)
        await while_stepping(model, anext(stream))
        await stream.aclose()

    asyncio.run(asyncio.wait_for(leave_after_the_first_event(), 60))
    model.go_on()
    deadline = time.monotonic() + 60
    while not engine.flush_cache():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.stats().num_aborted_requests_total > len(PROMPTS)
    assert engine._built.core.requests == {}


def test_params_and_ids_are_one_for_each_prompt(engine):
    for kwargs, param in (
        ({"params": [PARAMS] * 2}, "sampling_params"),
        ({"params": PARAMS, "request_ids": ["a", "b"]}, "rid"),
        ({"params": PARAMS, "request_ids": ["a", "b", "a"]}, "rid"),
    ):
        with pytest.raises(errors.RequestError) as raised:
            asyncio.run(collected(engine.stream(PROMPTS, **kwargs)))
        assert raised.value.param == param
    assert_nothing_ran(engine)
