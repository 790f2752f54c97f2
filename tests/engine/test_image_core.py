"""Images from a pipeline folder through the real scheduler, engine core and runner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import shutil
import time

import numpy as np
import pytest
from support import golden_images as golden
from support import golden_qwen_image, image_fake
from support.golden_images import PROMPTS, SQUARE, TALL
from support.waiting import wait_until

from jdllm import errors
from jdllm.engine.core import LaunchFailed
from jdllm.engine.start import startup
from jdllm.engine.start.images import build
from jdllm.runner.launch import compile_counter, executables

ATOL_ALONE = 5e-5  # launches of other sizes round differently
SMALL = (32, 32)


@functools.cache
def built() -> build.BuiltImages:
    config = build.ImageBuildConfig(
        directory=golden.PIPELINE,
        sizes=(SQUARE,),
        max_pixels=SQUARE[0] * SQUARE[1],
        max_running_requests=6,
        batching_max_size=2,
        caption_cache_bytes=6 * 512 * 64 * 4,  # six captions
        show_progress=False,
    )
    return build.build(config, startup.StartupProgress())


def run(*requests, core=None, most=10_000):
    """Returns what requests are told; waits for programs as the engine's loop does."""
    client, core = image_fake.Client(), core or built().core
    core.add(requests)
    for _ in range(most):
        if not core.has_work:
            return client
        client.take(core.step())
        time.sleep(core.pause_s)
    raise AssertionError(f"requests never end: {core.scheduler.stats()}")


def compiles():
    """Returns how many programs have been compiled, once none is in the making."""
    wait_until(lambda: built().first_use.num_waiting == 0)
    return compile_counter.COUNTER.count


def alone(request):
    """Returns the latents of a request that has the core to itself."""
    (product,) = run(request).products.values()
    return product


def golden_asks():
    latents = [golden.initial(SQUARE, j) for j in range(3)]
    return [golden.ask(PROMPTS[j], latents=latents[j], name=f"p{j}") for j in range(3)]


def test_golden_runs_come_out_of_the_core_and_nothing_compiles():
    run(*golden_asks())  # small programs of this test, if any
    before, merged = compiles(), built().core.counters.merged_forwards
    client = run(*golden_asks())
    assert compile_counter.COUNTER.count == before
    assert built().core.counters.merged_forwards > merged, "rows share steps"
    assert client.products.keys() == {"p0", "p1", "p2"} and not client.errors
    for name, image in client.products.items():
        pixels = golden.arrays()[f"96x96/g0/{name}/uint8"][0]
        assert np.abs(image.astype(int) - pixels).max() <= 1


def test_other_sizes_and_guidance_are_compiled_at_first_use_and_change_nobody():
    compiled = built().first_use.num_compiled
    guided = golden.ask(
        PROMPTS[2], scale=2.5, latents=golden.initial(SQUARE, 2), name="guided", output="latent"
    )
    small = golden.ask(size=SMALL, steps=2, name="small")
    client = run(guided, small, *golden_asks())
    assert built().first_use.num_compiled > compiled
    expected = golden.arrays()["96x96/g2.5/p2/latents_steps"][3, 0]
    np.testing.assert_allclose(client.products["guided"], expected, atol=6e-4)
    assert client.products["small"].shape == (*SMALL, 3)
    for j in range(3):
        pixels = golden.arrays()[f"96x96/g0/p{j}/uint8"][0]
        assert np.abs(client.products[f"p{j}"].astype(int) - pixels).max() <= 1


def test_floats_of_a_compiled_size_are_compiled_when_they_are_asked_for_not_when_they_are_due(
    caplog,
):
    one = golden.ask(PROMPTS[0], latents=golden.initial(SQUARE, 0), name="np", output="float")
    core, compiled = built().core, built().first_use.num_compiled
    steps = core.counters.denoising_steps
    core.add([one])
    core.step()
    assert "output='float') at its first use" in caplog.text, "announced at once"
    assert core.scheduler.stats().num_running == 0, "it holds no place"
    while built().first_use.num_compiled == compiled:
        assert not core.step() and core.counters.denoising_steps == steps
        time.sleep(core.pause_s)
    (image,) = run().products.values()
    assert built().first_use.num_compiled == compiled + 1
    pixels = golden.arrays()["96x96/g0/p0/uint8"][0]
    assert image.dtype == np.float32 and np.abs(image * 255 - pixels).max() <= 1


def test_random_traffic_gives_the_images_of_each_request_alone():
    rng = random.Random(5)
    asks = [
        golden.ask(
            rng.choice(PROMPTS),
            steps=rng.choice([1, 2, 3, 5]),
            seed=seed,
            partial=rng.choice([0, 1, 2]),
            output="latent",
            name=str(seed),
        )
        for seed in range(9)
    ]
    core, client, waiting = built().core, image_fake.Client(), list(asks)
    while waiting or core.has_work:
        if waiting and rng.random() < 0.4:
            core.add([waiting.pop()])
        if core.requests and rng.random() < 0.1:
            core.scheduler.drop_kv()  # as after a fault of another launch: rows begin anew
        client.take(core.step())
    assert client.products.keys() == {one.request_id for one in asks}
    for one in asks:
        again = golden.ask_again(one)
        assert client.frames[one.request_id].keys() == set(one.image.preview_steps)
        for frame in client.frames[one.request_id].values():
            assert frame.shape == (*SQUARE, 3) and frame.dtype == np.uint8
        np.testing.assert_allclose(client.products[one.request_id], alone(again), atol=ATOL_ALONE)
    assert built().rows.captions.hits > 0, "captions are encoded once"


def test_a_program_that_cannot_be_compiled_ends_its_requests_alone(monkeypatch):
    compile_ = executables.Executables._compile

    def broken(self, bucket, params, memory):
        if bucket.name == "step":
            raise RuntimeError("no such kernel")
        return compile_(self, bucket, params, memory)

    monkeypatch.setattr(executables.Executables, "_compile", broken)
    core = built().core
    begun_anew = core.scheduler.stats().total_preemptions
    core.add([golden.ask(size=(48, 32), name="lost"), *golden_asks()])
    client, failed = image_fake.Client(), []
    while core.has_work:
        try:
            client.take(core.step())
        except LaunchFailed as fault:
            failed += [(one.request_id, str(fault)) for one in fault.requests]
            client.take(fault.commits)
        time.sleep(core.pause_s)
    ((name, message),) = failed
    assert name == "lost" and "height=48" in message and "was not compiled" in message
    assert client.products.keys() == {"p0", "p1", "p2"}
    assert core.scheduler.stats().total_preemptions == begun_anew, "the others lose no step"


@contextlib.contextmanager
def built_behind(directory, size, progress):
    """Yields images of one size whose programs but the smallest are compiled after the start."""
    config = build.ImageBuildConfig(
        directory=directory,
        sizes=(size,),
        max_pixels=size[0] * size[1],
        max_running_requests=4,
        batching_max_size=2,
        show_progress=False,
        compiles_behind=True,
    )
    one = build.build(config, progress)
    try:
        yield one
    finally:
        one.release()


@pytest.mark.campaign
def test_a_start_that_leaves_larger_launches_to_later_serves_at_once_and_then_uses_them():
    progress = startup.StartupProgress()
    with built_behind(golden.PIPELINE, SMALL, progress) as one:
        assert one.buckets.image_tokens == one.pipeline.image_tokens, "of which steps know the cost"
        lengths, outputs = len(one.buckets.tokens), 2
        assert progress.total == 2 * lengths + 1 + outputs, "encode, step; begin; decode"
        asks = [golden.ask(size=SMALL, seed=n, output="latent", name=str(n)) for n in range(4)]
        first = run(*asks, core=one.core).products  # whatever has been compiled by now
        wait_until(lambda: one.first_use.num_waiting == 0)
        assert one.first_use.num_compiled == lengths, "steps of two"
        compiled, merged = compile_counter.COUNTER.count, one.core.counters.merged_forwards
        again = run(*map(golden.ask_again, asks), core=one.core).products
        assert compile_counter.COUNTER.count == compiled
        assert one.core.counters.merged_forwards == merged + 16, "4 requests of 4 steps, by two"
        for before, after in zip(first.values(), again.values(), strict=True):
            np.testing.assert_allclose(before, after, atol=ATOL_ALONE)


@pytest.mark.campaign
def test_requests_with_a_negative_prompt_find_their_programs_where_these_are_usual():
    """Qwen-Image's are guided by default. Nobody waits for theirs, once the start is quite over."""
    directory, size = golden_qwen_image.pipeline_path(), golden_qwen_image.SIZES[0]
    with built_behind(directory, size, startup.StartupProgress()) as one:
        assert not any(getattr(bucket, "is_guided", False) for bucket in one.runner.compiled)
        wait_until(lambda: one.first_use.num_waiting == 0)
        compiled = compile_counter.COUNTER.count
        asks = [
            golden_qwen_image.GOLDEN.ask(prompt, negative="a", seed=n, name=str(n))
            for n, prompt in enumerate(PROMPTS)
        ]
        assert len(run(*asks, core=one.core).products) == len(asks)
        assert compile_counter.COUNTER.count == compiled


@pytest.mark.parametrize("size", [(90, 96), (TALL[0], TALL[1] * 2)])
def test_sizes_that_cannot_be_served_are_refused_before_anything_is_compiled(size):
    config = build.ImageBuildConfig(
        directory=golden.PIPELINE, sizes=(size,), max_pixels=SQUARE[0] * SQUARE[1]
    )
    before = compiles()
    with pytest.raises(errors.ConfigError, match="warmup_resolutions: "):
        build.build(config, startup.StartupProgress())
    assert compile_counter.COUNTER.count == before


def test_a_limit_that_no_image_keeps_is_refused_by_name():
    config = build.ImageBuildConfig(directory=golden.PIPELINE, max_pixels=15)
    with pytest.raises(errors.ConfigError, match="max_image_pixels=15 must be at least 256"):
        build.build(config, startup.StartupProgress())


def test_a_shift_counts_for_the_sizes_that_requests_may_have(tmp_path):
    """At 128x128 and below numbers hold it, at 256x256 none does."""
    shutil.copytree(golden.PIPELINE, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    steep = {"use_dynamic_shifting": True, "shift": None, "base_shift": 0, "max_shift": 40.0,
             "base_image_seq_len": 0, "max_image_seq_len": 64}  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | steep))
    config = build.ImageBuildConfig(
        directory=tmp_path, sizes=((64, 64),), max_pixels=256 * 256, batching_max_size=1
    )
    with pytest.raises(errors.ConfigError, match="256 tokens.*; lower max_image_pixels"):
        build.build(config, startup.StartupProgress())
    built = build.build(
        dataclasses.replace(config, max_pixels=128 * 128), startup.StartupProgress()
    )
    sigmas = built.pipeline.sigmas(8, 128, 128)
    built.release()
    assert (sigmas[0], sigmas[-1]) == (1, 0) and np.isfinite(sigmas).all()


@pytest.mark.parametrize(
    ("running", "most", "rows"),
    [
        (None, None, (1, 2, 4, 8, 12)),
        (32, None, (1, 2, 4, 8, 12)),
        (3, None, (1, 2, 3)),
        (32, 20, (1, 2, 4, 8, 12, 20)),
        (4, 20, (1, 2, 4)),
        (None, 1, (1,)),
    ],
)
def test_no_program_is_for_more_requests_than_may_run(running, most, rows):
    config = build.ImageBuildConfig(
        directory=golden.PIPELINE, max_running_requests=running, batching_max_size=most
    )
    gpu = dataclasses.replace(built().device, platform="gpu")
    assert build._rows(config, gpu) == rows


def test_what_is_reported_is_what_is_there():
    one = built()
    held = one.runner._memory
    slots = held["slots"]
    assert one.slot_bytes == slots.latents.nbytes + slots.clean.nbytes
    assert one.caption_bytes == held["captions"].entries.nbytes == 6 * 512 * 64 * 4
    assert one.weight_bytes == sum(array.nbytes for array in one.runner._params.values())
    assert one.runner.step_bytes > 0
