"""Sizes of image launches: compiled, bounded, halved; and requests that could never run."""

import math
import random

import numpy as np
import pytest
from support.image_fake import (
    BUCKETS,
    LARGE,
    SMALL,
    WIDE,
    Client,
    alone,
    ask,
    build,
    kinds,
    run,
)

from jdllm import errors
from jdllm.engine.core import LaunchFailed
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows import interface
from jdllm.scheduler.rows.image import rows as image
from jdllm.scheduler.rows.image import sharing
from jdllm.scheduler.rows.image.buckets import ImageBuckets, StepBucket


def made(**options):
    return build(random.Random(0), **options)


@pytest.mark.parametrize(
    "count,cost,expected",
    [(1, 0.1, 1), (2, 0.1, 2), (3, 0.1, 2), (5, 0.1, 4), (7, 0.1, 4), (8, 0.1, 8), (11, 0.1, 8),
     (30, 0.1, 12), (3, 4.0, 4), (5, 4.0, 4), (7, 4.0, 8), (11, 4.0, 12)],
)  # fmt: skip
def test_steps_take_padding_only_where_a_launch_costs_much(count, cost, expected):
    buckets = ImageBuckets(launch_cost=cost)
    shape = StepBucket(rows=1, tokens=32, height=512, width=512, is_guided=False)
    found = sharing.choices(buckets, shape, buckets.rows, [32] * count)
    assert next(iter(found)).rows == expected
    assert all(places == [*range(count)] for places in found.values())


def test_sizes_are_bounded_by_pixels_and_guided_rows_count_twice():
    assert BUCKETS.step_sizes(*SMALL, False) == (1, 2, 4)
    assert BUCKETS.step_sizes(*SMALL, True) == (1, 2)
    assert BUCKETS.step_sizes(*LARGE, False) == (1,)
    assert BUCKETS.step_sizes(*LARGE, True) == (1,)
    found = BUCKETS.all()
    assert len(found) == len(set(found))
    assert {b for b in found if b.name != "encode"} == {
        b for size in (SMALL, WIDE, LARGE) for b in BUCKETS.of(*size)
    }
    assert sum(b.name == "step" for b in BUCKETS.of(*SMALL)) == 3 * (3 + 2)


@pytest.mark.parametrize(
    "options",
    [{"rows": (2, 4)}, {"decode_rows": ()}, {"encode_rows": (1, 1)}, {"tokens": (8, 4)},
     {"encode_tokens": 100}, {"guided": ()}],
)  # fmt: skip
def test_impossible_sizes_are_refused(options):
    with pytest.raises(errors.ConfigError, match=next(iter(options))):
        ImageBuckets(**options)


def test_other_sizes_wait_for_their_programs_and_delay_nobody():
    core, device = made(running=4)
    odd = ask(3, size=(96, 64), name="odd")
    core.scheduler.rows.programs.is_ready = device.programs.__contains__
    core.add([odd, ask(3, name="a"), ask(3, name="b")])
    client = Client()
    while len(client.products) < 2:
        client.take(core.step())
    assert kinds(device.trace) == ["encode", "step", "step", "step", "decode"]
    client.take(core.step())
    assert core.pause_s == image.PROGRAM_POLL_S
    first = [b for b in core.scheduler.rows.buckets_of(96, 64) if b.rows == 1]
    device.programs.update(first)
    core.add([ask(3, size=(96, 64), seed=s) for s in (4, 5)])
    run(core, client)
    assert client.products["odd"] == alone(odd)[1] and len(client.products) == 5


def test_the_decoding_of_a_new_size_is_asked_for_with_its_first_step():
    core, device = made(running=4)
    asked = []

    def is_ready(bucket):
        if bucket not in asked:
            asked.append(bucket)
        return bucket in device.programs

    core.scheduler.rows.programs.is_ready = is_ready
    core.add([ask(3, size=(96, 64), seed=s) for s in (4, 5)])
    while not core.pause_s:
        core.step()
    new = [one for one in asked if one.name != "encode"]
    assert [(one.name, one.rows) for one in new] == [("step", 1), ("decode", 1)]
    assert {(one.height, one.width) for one in new} == {(96, 64)}


# Too little memory.


def test_launches_become_half_as_large_then_single_and_then_fail():
    rows = made()[0].scheduler.rows

    def step(rows):
        bucket = StepBucket(rows=rows, tokens=8, height=64, width=64, is_guided=False)
        return ScheduleBatch(rows=(), bucket=bucket)

    one = ask()
    rows.live.add(one)
    rows.live.start(one, rows.admit(one))
    assert isinstance(rows, interface.CanHalve)
    assert rows._step_sizes(one) == (1, 2, 4)
    assert rows.halve(step(4)) and rows._step_sizes(one) == (1, 2)
    assert rows.halve(step(2)) and rows._step_sizes(one) == (1,)
    assert not rows.halve(step(1))


@pytest.mark.parametrize("kind", ["encode", "step", "decode"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_of_a_launch_without_memory_begin_again_in_smaller_ones(kind, overlaps):
    core, device = made(
        overlaps=overlaps, most=lambda bucket: 1 if bucket.name == kind else bucket.rows
    )
    asks = [ask(3, seed=n, prompt=(n + 1,), partial=2) for n in range(4)]
    core.add(asks)
    client, failures = Client(), []
    while core.has_work:
        try:
            client.take(core.step())
        except LaunchFailed as failed:
            failures.append(failed)
            client.take(failed.commits)
    assert failures and all(failed.requests == [] for failed in failures)
    for one in asks:
        assert (client.frames[one.request_id], client.products[one.request_id]) == alone(one)
    assert device.trace[-1].bucket.rows <= 2


def test_a_single_row_without_memory_fails_alone():
    core, _ = made(most=lambda bucket: 0 if bucket.height == 128 else 9)
    core.scheduler.rows.captions.take([(1, 2, 3)])  # already known: no launch to encode it
    core.scheduler.rows.captions.note_written(0)
    small, large = ask(3, size=SMALL), ask(3, size=LARGE)
    core.runner.captions[0] = 0
    core.add([small, large])
    with pytest.raises(LaunchFailed, match="RESOURCE_EXHAUSTED") as failed:
        run(core)
    assert failed.value.requests == [large]


# Bad input.


NAN, INFINITE = np.full((2, 2, 2), math.nan, np.float32), np.full((2, 2, 2), np.inf, np.float32)


@pytest.mark.parametrize(
    "options,param",
    [
        ({"size": (60, 64)}, "height"),
        ({"size": (64, 72)}, "width"),
        ({"size": (0, 64)}, "height"),
        ({"size": (64, -16)}, "width"),
        ({"size": (64, 144)}, "width"),
        ({"steps": 0}, "num_inference_steps"),
        ({"steps": 51}, "num_inference_steps"),
        ({"partial": 4}, "partial_images"),
        ({"partial": -1}, "partial_images"),
        ({"prompt": ()}, "prompt"),
        ({"prompt": range(33)}, "prompt"),
        ({"negative": (), "scale": 1.0}, "negative_prompt"),
        ({"negative": range(33), "scale": 1.0}, "negative_prompt"),
        ({"scale": math.nan}, "guidance_scale"),
        ({"latents": np.zeros((2, 2, 4), np.float32)}, "latents"),
        ({"latents": np.zeros((2, 2, 2))}, "latents"),
        ({"latents": NAN}, "latents"),
        ({"latents": INFINITE}, "latents"),
    ],
)
def test_what_could_never_run_is_refused_by_the_name_of_its_field(options, param):
    core, _ = made()
    with pytest.raises(errors.RequestError) as refused:
        core.add([ask(**options)])
    assert refused.value.param == param and not core.has_work


def test_refusals_that_depend_on_the_model():
    core, _ = made(num_entries=1)
    with pytest.raises(errors.RequestError, match="two captions") as refused:
        core.add([ask(negative=(9,), scale=1.0)])
    assert refused.value.param == "guidance_scale"
    core.add([ask(2, negative=(1, 2, 3), scale=1.0)])  # the same caption twice
    run(core)
    unguided = ImageBuckets(guided=(False,), sizes=(SMALL,))
    core, _ = made(buckets=unguided)
    with pytest.raises(errors.RequestError, match="without guidance"):
        core.add([ask(negative=(9,), scale=1.0)])
    text = ask()
    text.image = None
    with pytest.raises(errors.RequestError, match="makes images"):
        core.add([text])
