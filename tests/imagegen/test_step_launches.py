"""Rows that share launches: each is what it would be alone, whatever the others do."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from support import golden_images as golden
from support.golden_images import PROMPTS, SQUARE, TALL

from jdllm.runner.launch import compile_counter

# Batched against alone inside one implementation; with guidance the reference has 4e-5.
ATOL_ALONE = 5e-5
MEMORY_PARTS = {"encode": ["captions"], "begin": ["slots"], "decode": ["slots"]}


def alone(request):
    """Returns the final latents of a request that has the device to itself."""
    device = golden.Device()
    return device.finish(*device.enter(request), output="latent")[0]


def random_ask(rng):
    size = rng.choice([SQUARE, SQUARE, TALL])
    options = {"scale": rng.choice([1.0, 2.5])} if rng.random() < 0.4 else {}
    if rng.random() < 0.3:
        options["latents"] = golden.initial(size, rng.randrange(3))
    return golden.ask(
        rng.choice(PROMPTS),
        size=size,
        steps=rng.choice([1, 2, 3, 5]),
        seed=rng.randrange(2**40),
        truncation=rng.choice([0.3, 0.8, 1.0]),
        normalization=rng.choice([0.0, 0.0, 1.0]),
        **options,
    )


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_join_at_any_step_are_as_if_alone(seed):
    """Two sizes, guided and not, of different numbers of steps, in any slot and order."""
    rng = random.Random(seed)
    device, waiting = golden.Device(rng), [random_ask(rng) for _ in range(8)]
    running, done, num_shared = [], [], 0
    while waiting or running:
        if waiting and rng.random() < 0.6:
            running += device.enter(waiting.pop())
            continue
        if not running:
            continue
        group = rng.choice(running).group
        members = [row for row in running if row.group == group]
        members = rng.sample(members, rng.randint(1, min(len(members), golden.ROWS)))
        num_shared += len({row.step for row in members}) > 1
        device.step(*members)
        done += [row for row in running if row.is_done]
        running = [row for row in running if not row.is_done]
    assert num_shared > 0, "no launch had rows at different steps"
    assert {row.group for row in done} == {(SQUARE, False), (SQUARE, True), (TALL, False)} or seed
    for row in done:
        (latents,) = device.decode(row, output="latent")
        np.testing.assert_allclose(latents, alone(row.request), atol=ATOL_ALONE)


def test_noise_depends_on_the_seed_alone():
    first = golden.ask(PROMPTS[1], seed=2**33 + 5, steps=3)
    others = [golden.ask(PROMPTS[2], seed=seed, steps=3) for seed in (5, 2**33, 6)]
    device = golden.Device(random.Random(1))
    rows = device.enter(*others, first)
    products = device.finish(*rows, output="latent")
    np.testing.assert_allclose(products[3], alone(first), atol=ATOL_ALONE)
    noises = [noise_of(one) for one in (first, *others)]
    for i, one in enumerate(noises):
        assert abs(one.mean()) < 0.1 and abs(one.std() - 1) < 0.05
        assert all(np.abs(one - other).mean() > 0.5 for other in noises[:i])
    other_prompt = golden.ask(PROMPTS[0], seed=2**33 + 5, steps=2)
    np.testing.assert_allclose(noise_of(other_prompt), noises[0], atol=ATOL_ALONE)


def noise_of(request):
    """Returns the initial latents of a request, from what one step made of them.

    With x1 = x0 + (s1 - s0) v and clean = x0 - s0 v, x0 = (s0 x1 - (s0 - s1) ... ) / s1.
    """
    device = golden.Device()
    (row,) = device.enter(request)
    device.step(row)
    before, after = golden.schedule_of_goldens(request.image.num_inference_steps)[:2]
    assert before == 1.0
    (result,) = device.decoded(row, output="latent")
    clean, x = result.frames[0].value, device.latents(row)
    return clean + (x - clean) / after


def test_a_preview_is_the_decoded_prediction_of_its_step():
    device = golden.Device()
    request = golden.ask(PROMPTS[2], latents=golden.initial(SQUARE, 2))
    (row,) = device.enter(request)
    levels = golden.schedule_of_goldens(4)
    steps = golden.arrays()["96x96/g0/p2/latents_steps"][:, 0]
    device.step(row)
    device.step(row)
    (preview,) = device.decoded(row)
    assert preview.product is None and [frame.step for frame in preview.frames] == [2]
    velocity = (steps[1] - steps[0]) / (levels[2] - levels[1])
    clean = steps[1] - levels[2] * velocity  # x - sigma v, with x and sigma after the step
    # The same prediction as the final latents of another row, which is one step long.
    (given,) = device.enter(golden.ask(PROMPTS[2], steps=1, latents=clean.astype(np.float32)))
    held = device.decoded(row, output="latent")[0].frames[0].value
    np.testing.assert_allclose(held, clean, atol=6e-3)  # the velocity magnifies errors by 6.7
    del given


def test_a_row_of_nan_ends_alone():
    broken = golden.initial(SQUARE, 0).copy()
    broken[3, 5, 7] = np.nan
    asks = [
        golden.ask(PROMPTS[j], latents=broken if j == 1 else golden.initial(SQUARE, j))
        for j in range(3)
    ]
    device = golden.Device()
    rows = device.enter(*asks)
    for _ in range(4):
        assert [one.is_invalid for one in device.step(*rows)] == [False, True, False]
    for output in ("latent", "image"):
        results = device.decoded(*rows, output=output)
        assert [one.is_invalid for one in results] == [False, True, False]
        for i in (0, 2):
            (expected,) = golden.Device().decode(row_alone := finished(asks[i]), output=output)
            assert row_alone.is_done
            off = np.abs(results[i].product.astype(float) - expected).max()
            assert off <= (1 if output == "image" else ATOL_ALONE)
    # Its slot and its entry serve the next row.
    rows[1].request, rows[1].step = golden.ask(PROMPTS[1], seed=3), 0
    rows[1].is_fresh = True
    np.testing.assert_allclose(
        device.finish(rows[1], output="latent")[0], alone(rows[1].request), atol=ATOL_ALONE
    )


def finished(request):
    device = golden.Device()
    (row,) = device.enter(request)
    while not row.is_done:
        device.step(row)
    return row


def test_nan_in_a_caption_ends_its_rows_alone_and_leaves_nothing_in_the_entry():
    device = golden.Device()
    broken, other = device.enter(golden.ask(PROMPTS[2], seed=1), golden.ask(PROMPTS[0], seed=2))
    memory = device.runner._memory["captions"]
    (entry,) = broken.stay.entries
    device.runner._memory["captions"] = type(memory)(
        entries=memory.entries.at[entry].set(float("nan"))
    )
    assert [one.is_invalid for one in device.step(broken, other)] == [True, False]
    # A short caption comes into the entry; attention weighs what is behind it with zero.
    device._entries.append(entry)
    (row,) = device.enter(short := golden.ask(PROMPTS[0], seed=9), rows=1, tokens=32)
    assert row.stay.entries == (entry,)
    np.testing.assert_allclose(
        device.finish(row, output="latent")[0], alone(short), atol=ATOL_ALONE
    )


def test_nothing_compiles_after_the_start():
    device = golden.Device()
    device.finish(*device.enter(golden.ask()))  # small programs of the test itself, if any
    before = compile_counter.COUNTER.count
    for size, scale in ((SQUARE, 0.0), (TALL, 2.0), (SQUARE, 2.0), (TALL, 0.0)):
        latents = golden.initial(size, 0)
        rows = device.enter(
            golden.ask(size=size, scale=scale, seed=4),
            golden.ask(PROMPTS[2], size=size, scale=scale, latents=latents),
        )
        device.finish(*rows)
        device.decode(*rows, output="latent")
    assert compile_counter.COUNTER.count == before


def test_memory_is_never_copied():
    runner = golden.compiled()
    sizes = {
        name: [leaf.nbytes for leaf in jax.tree.leaves(part)]
        for name, part in runner._memory.items()
    }
    for bucket, compiled in runner.compiled.items():
        parts = MEMORY_PARTS.get(bucket.name, ["captions", "slots"])
        used = [size for part in parts for size in sizes[part]]
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(used), bucket
        extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert memory.temp_size_in_bytes + extra < min(used) / 4, bucket
