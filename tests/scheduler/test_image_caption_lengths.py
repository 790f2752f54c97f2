"""Images with captions of unequal lengths: they share steps unless padding costs too much."""

import dataclasses
import itertools
import random

import pytest
from support.image_fake import BUCKETS, SMALL, Client, ask, build, run
from support.image_watch import Watch, check_products

from jdllm.scheduler.rows.image import sharing as image_sharing
from jdllm.scheduler.rows.image.buckets import ImageBuckets, StepBucket

TOKENS, ROWS = (64, 128, 256, 512), (1, 2, 4, 8, 12)
IMAGE = 1024  # tokens of an image of 512 x 512
SHAPE = StepBucket(rows=1, tokens=64, height=512, width=512, is_guided=False)


def choices(lengths, *, image=IMAGE, cost=0.1, rows=ROWS):
    """Returns the buckets of steps, the best first, and the captions of those who could share."""
    buckets = ImageBuckets(
        tokens=TOKENS, launch_cost=cost, image_tokens=lambda height, width: image
    )
    found = image_sharing.choices(buckets, SHAPE, rows, lengths)
    return {bucket: [lengths[place] for place in places] for bucket, places in found.items()}


def best(lengths, **options):
    """Returns the captions of the rows of the best step."""
    bucket, sharing = next(iter(choices(lengths, **options).items()))
    assert bucket.tokens == max(sharing[: bucket.rows])
    return sharing[: bucket.rows]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([64, 64, 64, 64], [64, 64, 64, 64]),
        ([64, 512, 64, 64, 64], [64, 64, 64, 64]),
        ([512, 64, 64, 64], [512]),
        ([512, 64, 512, 64], [512, 512]),
        ([64, 128], [64, 128]),  # the padding of 64 tokens is less than a launch, 109
        ([128, 64], [128, 64]),
        ([256, 512, 256, 64], [256, 256]),
    ],
)
def test_a_longer_caption_is_left_out_where_it_costs_more_than_a_step(lengths, expected):
    assert best(lengths) == expected


def test_large_images_and_dear_launches_take_the_longest():
    """Of 4,096 tokens of an image a caption of 256 is little; a small model's launch is much."""
    assert best([64, 256, 64, 64], image=4096) == [64, 256, 64, 64]
    assert best([64, 64, 512, 64], cost=8.0) == [64, 64, 512, 64]


def test_who_shares_does_not_depend_on_whose_turn_it_is():
    """At the border, where either could be said to be better."""
    apart = {
        length: {
            tuple(len(best(pair, image=image)) for pair in ([64, length], [length, 64]))
            for image in range(64, 16384, 64)
        }
        for length in TOKENS[1:]
    }
    assert apart == {length: {(1, 1), (2, 2)} for length in TOKENS[1:]}


def divisions(lengths):
    """Yields every way to put lengths into sets, neighbours or not."""
    if not lengths:
        yield []
        return
    first, *others = lengths
    for number in range(len(others) + 1):
        for beside in itertools.combinations(others, number):
            rest = [length for length in others if length not in beside]
            for division in divisions(rest):
                yield [{first, *beside}, *division]


@pytest.mark.parametrize("seed", range(200))
def test_no_other_way_to_share_takes_much_less_time(seed):
    """Against every division of the lengths; within a set rows take turns in steps of one size."""
    rng = random.Random(seed)
    image, cost = rng.choice([64, 256, 1024, 4096]), rng.choice([0.05, 0.1, 1.0, 4.0])
    rows = ROWS[: rng.randint(1, len(ROWS))]
    lengths = rng.choices(TOKENS, weights=[rng.random() for _ in TOKENS], k=rng.randint(1, 14))

    def is_run(one):
        return all(length in one for length in lengths if min(one) <= length <= max(one))

    def time_of(division):
        total = 0.0
        for one in division:
            count = sum(length in one for length in lengths)
            steps = [
                (size * (image + max(one)) + cost * (image + TOKENS[0])) / min(size, count)
                for size in rows
            ]
            total += count * min(steps)
        return total

    chosen = []  # with each row as the first
    for first in range(len(lengths)):
        order = lengths[first:] + lengths[:first]
        found = choices(order, image=image, cost=cost, rows=rows)
        for bucket, sharing in found.items():
            assert sharing[0] == order[0] and bucket.rows in rows
            assert bucket.tokens == max(sharing[: bucket.rows])
        assert any((one.rows, one.tokens) == (1, order[0]) for one in found), "its own program"
        chosen.append({*next(iter(found.values()))})
    division = [one for number, one in enumerate(chosen) if one not in chosen[:number]]
    assert sorted(length for one in division for length in one) == sorted({*lengths})
    others = list(divisions(sorted({*lengths})))
    if len(lengths) > rows[-1]:
        # Sets of lengths that are no neighbours, which are not considered, may fill steps better.
        others = [other for other in others if all(map(is_run, other))]
    assert time_of(division) <= 1.03 * min(map(time_of, others)) * (1 + 1e-9)


def cost_of(trace, image):
    """Returns the tokens of all steps, padding included, and what their launches cost in tokens."""
    steps = [batch.bucket for batch in trace if batch.bucket.name == "step"]
    return sum((1 + one.is_guided) * one.rows * (image + one.tokens) + 0.1 * image for one in steps)


@pytest.mark.parametrize("seed", range(8))
def test_traffic_costs_less_than_with_all_captions_in_every_step(seed):
    """And rows still wait for fewer steps than there are running ones, which the watch asks."""
    image = 32
    costs = []
    for told in (image, 100_000):  # the second thinks nothing of captions
        rng = random.Random(seed)
        buckets = dataclasses.replace(BUCKETS, image_tokens=lambda height, width, told=told: told)
        core, device = build(rng, running=8, num_entries=40, buckets=buckets)
        asks = [
            ask(rng.randint(2, 9), size=SMALL, seed=n, prompt=[n] * rng.choice([3, 5, 8, 30]))
            for n in range(40)
        ]
        watch, client, todo = Watch(core, device), Client(), asks[::-1]
        while todo or core.has_work:
            if todo and len(core.requests) < 8:
                core.add([todo.pop()])
            watch.before()
            client.take(core.step())
            watch.after()
        check_products(asks, client, set())
        costs.append(cost_of(device.trace, image))
    assert costs[0] < 0.95 * costs[1]


def steps_of(core, device, **lengths):
    """Returns the rows and the tokens of each step of requests with prompts of these lengths."""
    core.add([ask(6, name=name, prompt=[1] * length) for name, length in lengths.items()])
    run(core)
    steps = [batch for batch in device.trace if batch.bucket.name == "step"]
    names = ["".join(row.request.request_id for row in batch.rows) for batch in steps]
    return names, [batch.bucket.tokens for batch in steps]


def test_rows_with_long_captions_take_turns_with_the_others():
    buckets = dataclasses.replace(BUCKETS, image_tokens=lambda height, width: 32)
    made = build(random.Random(0), running=4, buckets=buckets)
    found = steps_of(*made, a=4, b=30, c=4, d=30)
    assert found == (["ac", "bd"] * 6, [8, 32] * 6)


@pytest.mark.parametrize("image", range(20, 400, 20))
@pytest.mark.parametrize("lengths", [(4, 30), (30, 4), (12, 30), (4, 4, 30, 30), (30, 12, 4, 4)])
def test_rows_that_fit_into_steps_keep_pace(image, lengths):
    """Whether together or apart; some have one step ahead of others, for which encodings waited."""
    buckets = dataclasses.replace(BUCKETS, image_tokens=lambda height, width: image)
    made = build(random.Random(0), running=4, buckets=buckets)
    names, _ = steps_of(*made, **dict(zip("abcd", lengths, strict=False)))
    done = dict.fromkeys("abcd"[: len(lengths)], 0)
    for step in names:
        for name in step:
            done[name] += 1
        assert max(done.values()) - min(done.values()) <= len(lengths) // 2, names


def test_where_a_shared_step_is_not_compiled_each_has_its_own():
    buckets = dataclasses.replace(BUCKETS, image_tokens=lambda height, width: 1024)
    core, device = build(random.Random(0), running=4, buckets=buckets)
    core.scheduler.rows.programs.is_ready = lambda bucket: (
        bucket.name != "step" or (bucket.rows, bucket.tokens) != (2, 16)
    )
    names, tokens = steps_of(core, device, a=4, b=12)
    assert sorted(zip(names, tokens, strict=True)) == [("a", 8)] * 6 + [("b", 16)] * 6
    names, tokens = steps_of(*build(random.Random(0), running=4, buckets=buckets), a=4, b=12)
    assert ("ab", 16) in zip(names, tokens, strict=True)


def test_without_shared_steps_each_is_padded_to_its_own_caption():
    buckets = dataclasses.replace(BUCKETS, rows=(1,), image_tokens=lambda height, width: 1024)
    found = steps_of(*build(random.Random(0), running=4, buckets=buckets), a=4, b=30)
    assert found == (["a", "b"] * 6, [8, 32] * 6)
