"""When modulation is made before steps, and for whom together; other files have random traffic."""

import dataclasses
import random

import pytest
from support.image_fake import BUCKETS, Client, alone, ask, build, kinds, run

from jdllm.scheduler.rows.image.buckets import Windows

STEPS = 3  # of a window


def made(*, by_caption=True, rows=(1, 2, 4, 8), seed=0, **options):
    windows = Windows(steps=STEPS, by_caption=by_caption, rows=rows)
    buckets = dataclasses.replace(BUCKETS, windows=windows)
    return build(random.Random(seed), buckets=buckets, **options)


def launches(trace):
    """Returns (kind, the rows' names and steps) of the launches that modulate or step."""
    return [
        (batch.bucket.name, [f"{row.request.request_id}{row.step}" for row in batch.rows])
        for batch in trace
        if batch.bucket.name in ("modulate", "step")
    ]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 6, 8])
def test_a_lone_request_has_a_launch_for_each_window_and_none_behind_its_last_step(
    num_steps, overlaps
):
    core, device = made(overlaps=overlaps)
    one = ask(num_steps, partial=1)
    core.add([one])
    client = run(core)
    found = [kind for kind in kinds(device.trace) if kind != "decode"]
    windows = [min(STEPS, num_steps - start) for start in range(0, num_steps, STEPS)]
    assert found == ["encode", *(kind for n in windows for kind in ["modulate", *["step"] * n])]
    assert client.products == {one.request_id: alone(one)[1]}


def test_a_launch_takes_along_who_has_left_steps_behind_and_will_need_more():
    core, device = made()
    core.add([ask(8, name="a"), ask(3, name="b")])
    while len(launches(device.trace)) < 2:
        core.step()
    core.add([ask(4, name="c"), ask(2, name="d")])
    run(core)
    assert launches(device.trace) == [
        ("modulate", ["a0", "b0"]),
        ("step", ["a0", "b0"]),
        ("modulate", ["c0", "d0", "a1"]),  # of b all is there
        ("step", ["a1", "b1", "c0", "d0"]),
        ("step", ["a2", "b2", "c1", "d1"]),
        ("step", ["a3", "c2"]),
        ("modulate", ["a4", "c3"]),  # both are due
        ("step", ["a4", "c3"]),
        ("step", ["a5"]),
        ("step", ["a6"]),
        ("modulate", ["a7"]),
        ("step", ["a7"]),
    ]


@pytest.mark.parametrize("by_caption", [False, True])
def test_guided_requests_have_launches_of_two_captions_where_captions_count(by_caption):
    core, device = made(by_caption=by_caption)
    core.add([ask(2), ask(2, negative=(5,), scale=4.0)])
    run(core)
    found = [(b.bucket.num_passes, len(b.rows)) for b in device.trace if b.bucket.name[0] == "m"]
    assert found == ([(1, 1), (2, 1)] if by_caption else [(1, 2)])


@pytest.mark.parametrize("seed", range(4))
def test_there_is_at_most_one_launch_for_a_window_of_steps_and_for_an_image_that_begins(seed):
    """However images stand to each other, as long as a launch holds all that run."""
    rng = random.Random(seed)
    core, device = made(running=4, seed=seed)
    todo = [ask(rng.choice([2, 5, 20, 50]), prompt=(n,), seed=99 + n) for n in range(30)]
    asks, client = list(todo), Client()
    while todo or core.has_work:
        if todo and rng.random() < 0.3:
            core.add([todo.pop()])
        client.take(core.step())
    assert client.products == {one.request_id: alone(one)[1] for one in asks}
    found = kinds(device.trace)
    num_due, since = 0, 0
    for batch in device.trace:
        since += batch.bucket.name == "step"
        if batch.bucket.name == "modulate":
            if all(row.step for row in batch.rows):
                assert since >= STEPS or not num_due, "two launches for the steps of one window"
                num_due += 1
            since = 0
    assert num_due > 0 and found.count("modulate") <= 30 + found.count("step") / STEPS


def test_a_preempted_request_has_its_modulation_made_anew():
    core, device = made()
    one = ask(5)
    core.add([one])
    while len(launches(device.trace)) < 3:
        core.step()
    core.scheduler.drop_kv()
    client = run(core)
    assert one.num_preemptions and client.products == {one.request_id: alone(one)[1]}
    starts = [rows for kind, rows in launches(device.trace) if kind == "modulate"]
    name = one.request_id
    assert starts[-2:] == [[f"{name}0"], [f"{name}3"]]
