"""The law for images: whatever the traffic, every request gets the image it would get alone."""

import dataclasses
import random

import pytest
from support.image_fake import BUCKETS, Client, build, random_ask
from support.image_watch import Watch, check_memory, check_products

from jdllm.engine.core import LaunchFailed
from jdllm.scheduler.rows.image import buckets as image_buckets
from jdllm.scheduler.rows.image import sharing
from jdllm.scheduler.rows.image.buckets import Windows

NUM_REQUESTS = 60
WITH_CACHE = dataclasses.replace(BUCKETS, cached=(False, True))
WINDOWS = (
    None,
    Windows(steps=3, by_caption=True, rows=(1, 2, 4)),
    Windows(steps=5, by_caption=False, rows=(1,)),
)


def buckets_of(seed):
    """Returns buckets of models that have their modulation made in steps, or before them.

    From the seed `len(WINDOWS)` on their images have so few tokens that captions keep steps apart.
    """
    buckets = dataclasses.replace(WITH_CACHE, windows=WINDOWS[seed % len(WINDOWS)])
    if seed < len(WINDOWS):
        return buckets
    return dataclasses.replace(buckets, image_tokens=image_buckets.one_token_for_16x16)


def random_asks(rng):
    """Returns requests, some of which have a step cache."""
    asks = [random_ask(rng, seed) for seed in range(NUM_REQUESTS)]
    for one in asks[::10]:
        one.image = dataclasses.replace(one.image, residual_diff_threshold=0.5)
    return asks


def check_skipped(asks, client):
    """Checks the skipped steps of those that ended, also of those that began anew."""
    for one in asks:
        if one.request_id in client.products:
            is_cached = one.image.residual_diff_threshold > 0
            assert one.num_skipped == is_cached * (one.image.num_inference_steps // 2)


@pytest.mark.parametrize("overlaps", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize("running,num_entries", [(1, 2), (3, 2), (6, 8), (12, 40)])
@pytest.mark.parametrize("seed", range(6))
def test_no_neighbour_changes_an_image_and_nobody_starves(
    monkeypatch, overlaps, running, num_entries, seed
):
    apart, choices = [], sharing.choices

    def watched(buckets, shape, sizes, lengths):
        found = choices(buckets, shape, sizes, lengths)
        if len(next(iter(found.values()))) < len(lengths):
            apart.append(lengths)
        return found

    monkeypatch.setattr(sharing, "choices", watched)
    rng = random.Random(repr((overlaps, running, num_entries, seed)))
    core, device = build(
        rng, running=running, num_entries=num_entries, overlaps=overlaps, buckets=buckets_of(seed)
    )
    asks = random_asks(rng)
    watch, client, todo, gone = Watch(core, device), Client(), asks[::-1], set()
    while todo or core.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            if todo:
                core.add([todo.pop()])
        if rng.random() < 0.01 and core.requests:
            gone.add(rng.choice(sorted(core.requests)))
            core.abort(max(gone & core.requests.keys()))
        watch.before()
        client.take(core.step())
        watch.after()
        check_memory(core)
    check_products(asks, client, gone)
    check_skipped(asks, client)
    captions = core.scheduler.rows.captions
    assert captions.num_held == 0 and not core.requests
    encoded = sum(len(b.rows) for b in device.trace if b.bucket.name == "encode")
    assert encoded <= captions.misses and captions.hits > 0
    assert (captions.evictions > 0) == (num_entries < 12)
    if running > 3:
        keeps_apart = seed >= len(WINDOWS)
        least = 0.1 if keeps_apart else 0.2
        assert core.counters.merged_forwards > least * core.counters.denoising_steps
        assert (len(apart) > 10) == keeps_apart, "steps without captions of other lengths"


@pytest.mark.parametrize("overlaps", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize("seed", range(6))
def test_faults_end_their_own_rows_and_lack_of_memory_ends_none(overlaps, seed):
    rng = random.Random(repr((overlaps, seed)))

    def fault(batch):
        return RuntimeError("device fault") if rng.random() < 0.01 else None

    def most(bucket):
        return 2 if bucket.name == "step" and bucket.height == 64 else 1

    core, device = build(rng, overlaps=overlaps, fault=fault, most=most, buckets=buckets_of(seed))
    asks = random_asks(rng)
    client, todo, gone, halved = Client(), asks[::-1], set(), 0
    while todo or core.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            if todo:
                core.add([todo.pop()])
        if rng.random() < 0.01:
            core.scheduler.drop_kv()
        try:
            client.take(core.step())
        except LaunchFailed as failed:
            client.take(failed.commits)
            gone |= {one.request_id for one in failed.requests}
            assert len(failed.requests) == len({one.request_id for one in failed.requests})
            halved += "RESOURCE_EXHAUSTED" in str(failed)
            assert "RESOURCE_EXHAUSTED" not in str(failed) or not failed.requests
        check_memory(core)
    check_products(asks, client, gone)
    check_skipped(asks, client)
    assert halved > 1 and len(gone) < NUM_REQUESTS // 2
    assert core.scheduler.stats().total_preemptions > 0
    assert core.scheduler.rows.captions.num_held == 0 and not core.requests
