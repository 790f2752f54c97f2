"""What image rows launch, one case at a time; `test_image_traffic.py` has the random traffic."""

import random

import pytest
from support.image_fake import (
    LARGE,
    SMALL,
    WIDE,
    alone,
    ask,
    build,
    kinds,
    latents_of,
    run,
)

from jdllm.scheduler.rows.image import buckets


def made(**options):
    return build(random.Random(0), **options)


def steps_of(trace):
    return [batch for batch in trace if batch.bucket.name == "step"]


def names(batch):
    return [row.request.request_id for row in batch.rows]


# A request alone.


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("output", ["image", "latent"])
def test_a_lone_request_is_encoded_stepped_and_decoded_and_nothing_else(overlaps, output):
    core, device = made(overlaps=overlaps)
    one = ask(5, seed=3, output=output)
    core.add([one])
    client = run(core)
    assert kinds(device.trace) == ["encode", *["step"] * 5, "decode"]
    assert [batch.bucket.rows for batch in device.trace] == [1] * 7
    assert [batch.rows[0].step for batch in steps_of(device.trace)] == [0, 1, 2, 3, 4]
    assert client.products == {one.request_id: alone(one)[1]}
    assert one.nfe == 5


def test_given_latents_are_written_once_and_previews_are_decoded_at_once():
    core, device = made()
    one = ask(8, latents=latents_of(SMALL), partial=3)
    core.add([one])
    client = run(core)
    step = ["step"] * 2
    assert kinds(device.trace) == ["encode", "begin", *(step + ["decode"]) * 4]
    frames, product = alone(one)
    assert client.frames[one.request_id] == frames and sorted(frames) == [2, 4, 6]
    assert client.products[one.request_id] == product


@pytest.mark.parametrize(
    "steps,partial,expected",
    [(8, 3, (2, 4, 6)), (8, 1, (4,)), (9, 2, (3, 6)), (5, 3, (1, 2, 3)), (3, 3, (1, 2)),
     (2, 1, (1,)), (1, 3, ()), (50, 0, ())],
)  # fmt: skip
def test_previews_are_evenly_spaced_and_never_the_last_step(steps, partial, expected):
    assert ask(steps, partial=partial).image.preview_steps == expected


def test_a_guided_request_has_two_captions_in_one_launch():
    core, device = made()
    one = ask(2, prompt=range(12), negative=(5,), scale=4.0)
    core.add([one])
    client = run(core)
    assert kinds(device.trace) == ["encode", "step", "step", "decode"]
    encode, step = device.trace[0], device.trace[1]
    assert encode.bucket == buckets.EncodeBucket(rows=2, tokens=16)
    assert [row.ids for row in encode.rows] == [tuple(range(12)), (5,)]
    assert step.bucket.is_guided and step.bucket.tokens == 16
    assert client.products == {one.request_id: alone(one)[1]}


def test_steps_left_counts_what_has_been_reported():
    core, _ = made(overlaps=True)
    one = ask(3)
    core.add([one])
    left = []
    while core.has_work:
        core.step()
        if core.scheduler.running:
            left.append(core.scheduler.rows.steps_left(one))
    assert left == [3, 3, 2, 1, 0]


# Rows that meet.


def test_rows_of_one_size_share_steps_wherever_they_are():
    core, device = made()
    first, later = ask(6, seed=1), ask(3, seed=2, prompt=(7,))
    core.add([first])
    for _ in range(3):
        core.step()
    core.add([later])
    client = run(core)
    assert kinds(device.trace) == [
        "encode", "step", "step", "encode", "step", "step", "step", "decode", "step", "decode",
    ]  # fmt: skip
    shared = [[row.step for row in batch.rows] for batch in steps_of(device.trace)]
    assert shared == [[0], [1], [2, 0], [3, 1], [4, 2], [5]]
    assert client.products == {one.request_id: alone(one)[1] for one in (first, later)}
    assert core.counters.merged_forwards == 6 and core.counters.denoising_steps == 9


@pytest.mark.parametrize(
    "other", [{"size": WIDE}, {"size": LARGE}, {"negative": (5,), "scale": 1.0}]
)
def test_groups_that_cannot_share_take_turns(other):
    core, device = made()
    core.add([ask(4, name="a"), ask(4, name="b", **other)])
    run(core)
    assert [names(batch) for batch in steps_of(device.trace)] == [["a"], ["b"]] * 4


def test_rows_beyond_a_launch_take_turns_and_no_place_stays_empty():
    core, device = made(running=6)
    core.add([ask(4, name=name, prompt=(1,)) for name in "abcdef"])
    run(core)
    steps = steps_of(device.trace)
    assert ["".join(names(batch)) for batch in steps[:3]] == ["abcd", "efab", "cdab"]
    assert all(len(batch.rows) == batch.bucket.rows for batch in steps)
    assert sum(len(batch.rows) for batch in steps) == 24


@pytest.mark.parametrize("size,count,bound", [(SMALL, 3, 2), (LARGE, 3, 8)])
def test_arrivals_delay_a_running_row_by_one_launch_a_step(size, count, bound):
    core, device = made(running=4)
    core.add([ask(20, name="runs")])
    for _ in range(4):
        core.step()
    device.trace.clear()
    core.add([ask(4, prompt=(9, n) * 8, size=size, latents=latents_of(size)) for n in range(count)])
    run(core)
    mine = [i for i, batch in enumerate(device.trace) if "runs" in names(batch)]
    # Of another size, of which a step has one row, each arrival takes a turn and a launch.
    assert max(b - a for a, b in zip([-1, *mine], mine, strict=False)) <= bound
    letters = "".join(kind[0] for kind in kinds(device.trace[: mine[-1]]))
    assert not {"be", "eb", "bb", "ee", "bd", "db", "dd"} & {
        letters[i : i + 2] for i in range(len(letters))
    }


def test_finished_rows_are_decoded_together_before_new_captions_are_encoded():
    core, device = made(running=6)
    core.add([ask(steps, name=name) for name, steps in zip("abcd", (2, 2, 9, 9), strict=True)])
    while len(steps_of(device.trace)) < 2:
        core.step()
    core.add([ask(2, name="e", prompt=(4, 4))])
    device.trace.clear()
    for _ in range(4):
        core.step()
    assert [(b.bucket.name, "".join(names(b))) for b in device.trace] == [
        ("decode", "ab"), ("step", "cd"), ("encode", "e"), ("step", "ec"),
    ]  # fmt: skip


def test_outputs_are_decoded_in_the_order_in_which_they_became_due():
    core, device = made()
    core.add([ask(2, size=LARGE, name="c"), ask(1, name="a"), ask(1, name="b", output="latent")])
    run(core)
    assert [(b.bucket.name, "".join(names(b))) for b in device.trace[1:]] == [
        ("step", "c"), ("step", "ab"), ("decode", "a"), ("step", "c"), ("decode", "b"),
        ("decode", "c"),
    ]  # fmt: skip


def test_of_outputs_of_one_step_previews_are_first_because_their_rows_wait():
    core, device = made()
    core.add([ask(1, name="a", output="latent"), ask(2, name="b", partial=1)])
    run(core)
    assert [(b.bucket.name, "".join(names(b))) for b in device.trace[1:]] == [
        ("step", "ab"), ("decode", "b"), ("step", "b"), ("decode", "a"), ("decode", "b"),
    ]  # fmt: skip


# Captions.


def test_equal_captions_are_encoded_once_even_before_the_first_encoding():
    core, device = made(running=6)
    same = [ask(3, prompt=(8, 8), negative=(8, 8), scale=1.0) for _ in range(3)]
    core.add([*same, ask(3, prompt=(8, 8))])
    run(core)
    core.add([ask(1, prompt=(8, 8))])
    run(core)
    assert kinds(device.trace).count("encode") == 1 and len(device.trace[0].rows) == 1
    captions = core.scheduler.rows.captions
    assert (captions.hits, captions.misses, captions.evictions) == (7, 1, 0)
    assert core.scheduler.flush_cache()
    core.add([ask(1, prompt=(8, 8))])
    run(core)
    assert kinds(device.trace).count("encode") == 2, "the flush forgot it"


def test_a_request_without_a_free_entry_waits_and_the_least_recently_used_goes():
    core, device = made(num_entries=2)
    core.add([ask(2, prompt=(1,)), ask(4, prompt=(2,)), ask(1, prompt=(3,))])
    core.step()
    assert [len(core.scheduler.running), len(core.scheduler.waiting)] == [2, 1]
    run(core)
    core.add([ask(1, prompt=(2,))])  # (1,) was given up for (3,)
    run(core)
    encoded = [row.ids for b in device.trace if b.bucket.name == "encode" for row in b.rows]
    assert encoded == [(1,), (2,), (3,)]


def test_an_abort_before_its_encoding_leaves_no_caption_behind():
    core, device = made(running=1)
    first, second = ask(3, prompt=(4,)), ask(3, prompt=(4,))
    core.add([first])
    core.scheduler._admit()
    core.abort(first.request_id)
    core.add([second])
    client = run(core)
    assert client.products == {second.request_id: alone(second)[1]}
    assert kinds(device.trace)[0] == "encode"


def test_an_encode_launch_is_bounded_in_tokens():
    core, device = made(running=6)
    core.add([ask(1, prompt=[n] * length) for n, length in enumerate((3, 3, 20, 3, 3))])
    run(core)
    encodes = [b.bucket for b in device.trace if b.bucket.name == "encode"]
    # 4 captions of 32 tokens would be 128, more than the 64 of BUCKETS.
    assert [(b.rows, b.tokens) for b in encodes] == [(2, 8), (2, 32), (1, 8)]


# A start may wait for others.


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_first_step_waits_for_others_up_to_the_delay_and_running_rows_never():
    clock = Clock()
    core, device = made(delay_s=0.5, clock=clock)
    core.add([ask(6, name="a", arrival_s=100.0)])
    core.step()
    core.step()
    assert kinds(device.trace) == ["encode"], "nothing else waits"
    clock.now = 100.2
    core.add([ask(6, name="b", arrival_s=100.2, prompt=(2,))])
    core.step()
    core.step()
    core.step()
    assert kinds(device.trace) == ["encode", "encode"]
    assert core.pause_s == pytest.approx(0.3)  # since the first came
    clock.now = 100.5
    core.step()
    assert names(device.trace[-1]) == ["a", "b"]
    core.add([ask(2, name="c", arrival_s=100.5)])
    run(core)
    assert kinds(device.trace)[2:5] == ["step"] * 3


def test_a_full_launch_waits_for_nobody_and_no_delay_is_the_default():
    core, device = made(delay_s=5.0, clock=Clock())
    core.add([ask(1, arrival_s=100.0) for _ in range(4)])
    run(core)
    assert kinds(device.trace) == ["encode", "step", "decode", "decode"]
    core, device = made(clock=Clock())
    core.add([ask(1, arrival_s=100.0)])
    run(core)
    assert kinds(device.trace) == ["encode", "step", "decode"]
