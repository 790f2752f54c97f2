"""Steps of images with captions of unequal lengths: padding costs no more than it saves."""

import dataclasses
import itertools
import random

import pytest
from support.image_fake import BUCKETS, SMALL, Client, ask, build, run
from support.image_watch import Watch, check_products

from jdllm.scheduler.rows import image_buckets

TOKENS, ROWS = (64, 128, 256, 512), (1, 2, 4, 8, 12)
IMAGE = 1024  # tokens of an image of 512 x 512


def choice(lengths, *, image=IMAGE, cost=0.1, rows=ROWS):
    """Returns the size of the best step, its captions, and the captions of its rows."""
    buckets = image_buckets.ImageBuckets(tokens=TOKENS, launch_cost=cost)
    rows, captions = buckets.by_worth(image, rows, lengths)[0]
    return rows, captions, [length for length in lengths if length in captions][:rows]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([64, 64, 64, 64], [64, 64, 64, 64]),
        ([64, 512, 64, 64, 64], [64, 64, 64, 64]),  # those who fit, whatever their places
        ([512, 64, 64, 64], [512]),
        ([512, 64, 512, 64], [512, 512]),
        ([64, 256], [64, 256]),  # a little padding is no more than a launch
        ([128, 64], [128, 64]),
        ([256, 512, 256, 64], [256, 256]),
    ],
)
def test_a_longer_caption_is_left_out_where_it_costs_more_than_a_step(lengths, expected):
    assert choice(lengths)[2] == expected


def test_large_images_and_dear_launches_take_the_longest():
    """Of 4,096 tokens of an image a caption of 256 is little; a small model's launch is much."""
    assert choice([64, 256, 64, 64], image=4096)[2] == [64, 256, 64, 64]
    assert choice([64, 64, 512, 64], cost=8.0)[2] == [64, 64, 512, 64]


@pytest.mark.parametrize("seed", range(200))
def test_no_other_step_that_takes_rows_in_turn_wastes_much_less(seed):
    """Against all lengths and sizes, whether compiled steps have them or not."""
    rng = random.Random(seed)
    image, cost = rng.choice([64, 256, 1024, 4096]), rng.choice([0.05, 0.1, 1.0, 4.0])
    rows = ROWS[: rng.randint(1, len(ROWS))]
    lengths = rng.choices(TOKENS, weights=[rng.random() for _ in TOKENS], k=rng.randint(1, 14))

    def share(size, least, most):
        """Returns the share of useful tokens in what a step costs."""
        useful, places = 0, size
        for length in lengths:
            if places and least <= length <= most:
                useful, places = useful + image + length, places - 1
        return useful / (size * (image + most) + cost * (image + TOKENS[0]))

    size, captions, served = choice(lengths, image=image, cost=cost, rows=rows)
    least, most = captions[0], captions[-1]
    assert size in rows and served[0] == lengths[0]
    others = itertools.product(rows, TOKENS, TOKENS)
    others = [other for other in others if other[1] <= lengths[0] <= other[2]]
    best = max(share(*other) for other in others)
    assert 1.03 * share(size, least, most) >= best * (1 - 1e-9)
    # No further row is left out for so little.
    wider = [one for one in others if one[0] == size and one[1] <= least and one[2] >= most]
    wider = [
        one
        for one in wider
        if {*lengths} & {*range(one[1], one[2] + 1)}
        > {length for length in lengths if least <= length <= most}
    ]
    assert all(1.03 * share(*one) < best * (1 + 1e-9) for one in wider)


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


def test_rows_with_long_captions_take_turns_with_the_others():
    buckets = dataclasses.replace(BUCKETS, image_tokens=lambda height, width: 32)
    core, device = build(random.Random(0), running=4, buckets=buckets)
    core.add([ask(3, name=name, prompt=[1] * n) for name, n in zip("abcd", (4, 30, 4, 30))])
    run(core)
    steps = [batch for batch in device.trace if batch.bucket.name == "step"]
    found = ["".join(row.request.request_id for row in batch.rows) for batch in steps]
    assert found == ["ac", "bd"] * 3
    assert [batch.bucket.tokens for batch in steps] == [8, 32] * 3
