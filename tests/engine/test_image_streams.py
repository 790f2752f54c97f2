"""`ImageEngine.stream`, as the server uses it: events, aborts, faults, limits, the end."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from support import image_engine, waiting

from jdllm import errors
from jdllm.engine import core
from jdllm.engine.images import requests

SIDE = {"height": 96, "width": 96}
LONG = {**SIDE, "num_inference_steps": 500}


def engine():
    return image_engine.shared()


def ask(prompt="a cat", **options):
    defaults = {"num_inference_steps": 4, "seed": 1} | SIDE
    return requests.ImageRequest(prompt=prompt, **defaults | options)


async def collected(*asked, rid="call", **options):
    async with contextlib.aclosing(engine().stream(asked, rid=rid, **options)) as events:
        return [event async for event in events]


def run(*asked, **options):
    return asyncio.run(collected(*asked, **options))


def finals(events):
    assert all(event.kind == "final" for event in events)
    return [one.image for one in sorted(events, key=lambda event: event.request_index)]


def test_previews_and_the_image_come_in_order_with_their_times():
    *previews, last = run(ask(partial_images=2, num_inference_steps=6))
    assert [event.kind for event in previews] == ["partial", "partial"]
    assert [event.partial_index for event in previews] == [0, 1]
    assert [event.steps for event in previews] == [2, 4]
    assert (last.kind, last.steps, last.seed, last.request_index) == ("final", 6, 1, 0)
    for event in (*previews, last):
        assert event.image.shape == (96, 96, 3) and event.image.dtype == np.uint8
    assert last.prompt_tokens > 0 and last.truncated_tokens == 0
    assert last.denoise_s > 0 and last.decode_s > 0
    assert min(last.queue_s, last.encode_s) >= 0
    assert previews[0].decode_s == 0 and previews[1].denoise_s > previews[0].denoise_s
    (plain,) = finals(run(ask(num_inference_steps=6)))
    np.testing.assert_array_equal(plain, last.image)  # previews change nothing


def test_tokens_that_are_cut_off_are_counted():
    prompt = "a very long prompt about cats"
    (whole,) = run(ask(prompt))
    (cut,) = run(ask(prompt, max_sequence_length=whole.prompt_tokens - 3))
    assert (cut.prompt_tokens, cut.truncated_tokens) == (whole.prompt_tokens - 3, 3)


def test_an_abort_ends_exactly_the_named_request():
    async def work():
        # Three of four: the longest is still there when it is aborted.
        asked = [ask(**LONG, partial_images=1), ask(seed=2), ask(seed=3)]
        found = []
        async with contextlib.aclosing(engine().stream(asked, rid="call")) as events:
            async for event in events:
                found.append(event)
                if len(found) == 2:
                    assert await asyncio.to_thread(engine().abort, "call") == 0
                    assert await asyncio.to_thread(engine().abort, "call-0") == 1
        return found

    found = asyncio.run(work())
    assert sorted((event.kind, event.request_index) for event in found) == [
        ("abort", 0), ("final", 1), ("final", 2),
    ]  # fmt: skip
    assert [event.message for event in found if event.kind == "abort"] == ["aborted"]


def test_a_closed_iterator_ends_its_requests():
    steps = engine().stats().denoising_steps_total

    async def work():
        events = engine().stream([ask(**LONG, partial_images=3)], rid="call")
        await anext(events)
        await events.aclose()

    asyncio.run(work())
    waiting.wait_until(lambda: not engine().stats().num_running_reqs)
    assert engine().stats().denoising_steps_total - steps < 400


def test_only_the_row_with_invalid_numbers_ends():
    huge = np.full((16, 12, 12), 3e38, np.float32)
    events = run(ask(latents=huge, num_inference_steps=3), ask(seed=5))
    by_index = {event.request_index: event for event in events}
    assert by_index[0].kind == "fault" and "NaN" in by_index[0].message
    assert by_index[0].image is None
    (alone,) = finals(run(ask(seed=5)))
    np.testing.assert_allclose(by_index[1].image.astype(int), alone, atol=1)


def test_smaller_launches_follow_where_memory_does_not_suffice(monkeypatch):
    runner = engine()._built.runner
    launch, failed = runner.launch, []

    def too_large(batch):
        if batch.bucket.name == "step" and batch.bucket.rows > 1:
            failed.append(batch.bucket)
            raise RuntimeError(f"{core.OUT_OF_MEMORY}: Out of memory allocating 1 byte.")
        return launch(batch)

    asked = [ask(seed=seed) for seed in range(3)]
    expected = finals(run(*asked))
    rows = engine()._built.rows
    monkeypatch.setattr(runner, "launch", too_large)
    monkeypatch.setattr(rows, "_row_limits", type(rows._row_limits)())
    found = finals(run(*asked))
    assert len(failed) == 1, "then every step has one row"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(int), other, atol=1)


def test_a_failed_launch_is_a_fault_of_its_rows(monkeypatch):
    runner = engine()._built.runner
    launch = runner.launch

    def broken(batch):
        if batch.bucket.name == "decode":
            raise RuntimeError("the device fell over")
        return launch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", broken)
        (event,) = run(ask())
    assert (event.kind, event.image) == ("fault", None)
    assert "the device fell over" in event.message
    assert finals(run(ask()))


def test_what_cannot_be_taken_is_refused_for_all():
    with pytest.raises(errors.RequestError, match="max_queued_requests allow 12") as caught:
        run(*[ask() for _ in range(13)])
    assert caught.value.param == "n"
    with pytest.raises(errors.RequestError) as caught:
        run(ask(), ask(height=90))
    assert caught.value.param == "height"
    with pytest.raises(errors.RequestError, match="--enable-priority-scheduling"):
        run(ask(), priority=3)
    assert not engine()._built.core.requests

    async def twice():
        events = engine().stream([ask(**LONG, partial_images=3)], rid="same")
        await anext(events)
        with pytest.raises(errors.RequestError, match="in use") as caught:
            await collected(ask(), rid="same")
        assert caught.value.param == "rid"
        with pytest.raises(errors.QueueFull):
            await collected(*[ask() for _ in range(12)])
        await events.aclose()

    asyncio.run(twice())


def test_captions_are_kept_until_they_are_flushed():
    waiting.wait_until(lambda: not engine()._built.core.requests)
    before = engine().stats()
    run(ask("a caption of this test"))
    run(ask("a caption of this test", seed=2))
    after = engine().stats()
    assert after.caption_cache_hits_total == before.caption_cache_hits_total + 1
    assert after.caption_cache_misses_total == before.caption_cache_misses_total + 1
    assert after.images_total == before.images_total + 2
    assert after.num_cached_captions > 0
    assert engine().flush_cache()
    assert engine().stats().num_cached_captions == 0


def test_an_engine_that_drains_takes_nothing_and_ends_what_runs():
    async def work():
        events = engine().stream([ask(num_inference_steps=40, partial_images=1)], rid="call")
        await anext(events)
        engine().stop_admitting()
        with pytest.raises(errors.EngineStopped):
            await collected(ask(), rid="late")
        assert await asyncio.to_thread(engine().drain, 60.0)
        return [event async for event in events]

    try:
        (last,) = asyncio.run(work())
        assert last.kind == "final"
    finally:
        engine()._loop.is_admitting = True


def test_a_first_use_is_counted_and_announced(caplog):
    before = engine().stats().first_use_compiles_total
    caplog.set_level("INFO", logger="jdllm.engine.start.images.first_use")
    (image,) = finals(run(ask(height=48, width=32)))
    assert image.shape == (48, 32, 3)
    assert engine().stats().first_use_compiles_total > before
    waiting.wait_until(lambda: not engine().stats().num_waiting_compiles)
    text = caplog.text
    assert "compiling StepBucket" in text and "at its first use" in text and " s\n" in text


def test_information_is_json_and_names_no_option_of_text():
    info = engine().server_info()
    assert info["pipeline"] == "ZImagePipeline" and info["batching_max_size"] == 2
    assert "dllm_algorithm" not in info and info["image_facts"]["size_multiple"] == 16
    assert engine().model_info()["preferred_sampling_params"]["num_inference_steps"] == 8
