"""The engine for asyncio callers: streams of dicts, text and ids, and a loop that goes on.

The engine is real, the model computable (`support/hash_engine.py`).
"""

import asyncio
import contextlib

import numpy as np
import pytest
from support import hash_engine, stalls, waiting
from support.hash_model import B, decode_text

from jdllm import errors
from jdllm.engine import input_processor
from jdllm.host import offload
from jdllm.options import sampling_params

OPTIONS = {"max_new_tokens": 3 * B, "seed": 5, "ignore_eos": True}
PARAMS = sampling_params.SamplingParams(**OPTIONS)
TEXTS = ["eee", "fgh"]
IDS = [[4, 4, 4], [5, 6, 7]]


@pytest.fixture
def engine():
    with hash_engine.make_engine() as running:
        yield running
        running._built.runner.go_on()


async def collected(events):
    async with contextlib.aclosing(events):
        return [event async for event in events]


def expected_texts(options):
    params = sampling_params.SamplingParams(**options)
    return [
        decode_text(hash_engine.expected(ids, params, choice))
        for ids in IDS
        for choice in range(params.n)
    ]


def without_times(parts):
    return [
        {
            **part,
            "meta_info": {
                key: value
                for key, value in part["meta_info"].items()
                if key not in ("id", "e2e_latency", "queue_time")
            },
        }
        for part in parts
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_async_generate_streams_what_generate_streams(engine, n):
    options = OPTIONS | {"n": n}

    async def parts(prompt):
        events = await engine.async_generate(prompt, options, stream=True)
        return await collected(events)

    for prompt in ("eee", TEXTS):
        got = asyncio.run(parts(prompt))
        wanted = list(engine.generate(prompt, options, stream=True))
        key = lambda part: (part.get("index", 0), len(part["output_ids"]))  # noqa: E731
        assert sorted(without_times(got), key=key) == sorted(without_times(wanted), key=key)
    last = {part["index"]: part["text"] for part in got}
    assert [last[index] for index in sorted(last)] == expected_texts(options)


def test_closing_an_async_stream_aborts_its_requests(engine):
    async def leave():
        events = await engine.async_generate(TEXTS, OPTIONS, stream=True)
        await anext(events)
        await events.aclose()

    asyncio.run(leave())
    waiting.wait_until(lambda: not engine._built.core.requests)
    assert engine.flush_cache()


@pytest.mark.parametrize(
    "prompts",
    [TEXTS, IDS, [TEXTS[0], IDS[1]], np.array(IDS)],
    ids=["texts", "ids", "mixed", "array"],
)
def test_stream_takes_texts_and_ids_dicts_and_params(engine, prompts):
    for params in (OPTIONS, PARAMS, [OPTIONS, PARAMS]):
        for events in (
            asyncio.run(collected(engine.stream(prompts, params))),
            list(engine.iterate(prompts, params)),
        ):
            finals = {one.prompt_index: one.text for one in events if one.finish_reason}
            assert [finals[0], finals[1]] == expected_texts(OPTIONS)


@pytest.mark.parametrize("prompt", [TEXTS[0], IDS[0]])
def test_stream_takes_one_prompt(engine, prompt):
    events = asyncio.run(collected(engine.stream(prompt, OPTIONS)))
    assert events[-1].text == expected_texts(OPTIONS)[0]


@pytest.mark.parametrize("prompts", [[None], [{"a": 1}], ["eee", 5]])
def test_stream_refuses_what_is_no_prompt(engine, prompts):
    with pytest.raises(errors.RequestError) as raised:
        asyncio.run(collected(engine.stream(prompts, OPTIONS)))
    assert raised.value.param == "prompt"
    assert hash_engine.num_requests(engine) == 0


def test_a_full_queue_is_told_before_any_choice_is_built(engine, monkeypatch):
    model = engine._built.runner
    places = hash_engine.ROWS + hash_engine.QUEUE

    async def refused():
        model.hold()
        first = engine.stream([[4]] * (places - 1), OPTIONS)
        waiting_for = asyncio.create_task(anext(first))
        while hash_engine.num_requests(engine) < places - 1:
            await asyncio.sleep(0.01)

        def build(*_, **__):
            raise AssertionError("choices were built")

        monkeypatch.setattr(input_processor.InputProcessor, "choices", build)
        engine.check_places(1)
        with pytest.raises(errors.QueueFull, match="no room for 2 more"):
            engine.stream(IDS, OPTIONS)
        model.go_on()
        await waiting_for
        await first.aclose()

    asyncio.run(asyncio.wait_for(refused(), 60))
    assert hash_engine.num_requests(engine) == places - 1


@pytest.mark.parametrize("route", ["stream", "async_generate"])
def test_a_long_list_leaves_the_event_loop_alone(engine, monkeypatch, route):
    """It is refused at its last prompt, when all others have been made."""
    monkeypatch.setattr(engine._built.core.scheduler, "_max_queued", 10**6)
    monkeypatch.setattr(engine, "config", engine._built.config)
    object.__setattr__(engine.config, "max_queued_requests", 10**6)
    prompts = [[4] * 20] * 20_000 + [[99]]

    async def work():
        async with stalls.no_long_stall():
            with pytest.raises(errors.RequestError, match="99, not a token id"):
                if route == "stream":
                    await collected(engine.stream(prompts, PARAMS))
                else:
                    await engine.async_generate(input_ids=prompts, sampling_params=OPTIONS)

    asyncio.run(work())
    assert hash_engine.num_requests(engine) == 0


def test_large_work_is_done_in_a_thread_in_the_order_of_arrival():
    done = []

    async def run():
        small = await offload.off_loop(offload.INLINE_SIZE, threading_name)
        first, *rest = await asyncio.gather(
            *(offload.off_loop(offload.INLINE_SIZE + 1, done.append, i) for i in range(20))
        )
        large = await offload.off_loop(offload.INLINE_SIZE + 1, threading_name)
        assert first is None and len(rest) == 19
        return small, large

    def threading_name():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return "thread"
        return "loop"

    assert asyncio.run(run()) == ("loop", "thread")
    assert sorted(done) == list(range(20))
