"""Rows that share launches: each is what it would be alone, whatever the others do."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_pipelines, image_launches
from support.image_launches import NEGATIVE, PROMPTS

from jdllm.device import devices
from jdllm.pipelines import loaded
from jdllm.runner.image.kind import ImageKind
from jdllm.runner.launch import compile_counter, interrupts
from jdllm.scheduler.batch import ScheduleBatch

# Batched against alone inside one implementation; with guidance the reference has 4e-5.
ATOL_ALONE = 5e-5
ATOL_LATENTS = 6e-4  # against the goldens, see test_golden_runs.py
MEMORY_PARTS = {
    "encode": ["captions"],
    "begin": ["slots"],
    "modulate": ["captions", "modulations"],
    "decode": ["slots"],
}


def alone(golden, request):
    """Returns the final latents of a request that has the device to itself."""
    device = golden.device()
    return device.finish(*device.enter(request), output="latent")[0]


def random_ask(golden, rng, number):
    size = golden.sizes[number % 2]
    options = {"negative": NEGATIVE} if number % 4 > 1 else {}
    if rng.random() < 0.3:
        options["latents"] = golden.initial(size, rng.randrange(3))
    return golden.ask(
        rng.choice(PROMPTS),
        size=size,
        steps=rng.choice([1, 2, 3, 5]),
        seed=rng.randrange(2**40),
        **options,
        **golden.draw(rng, "negative" in options),
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
@golden_pipelines.of_few
def test_rows_that_join_at_any_step_are_as_if_alone(golden, seed):
    """Two sizes, guided and not, of different numbers of steps, in any slot and order."""
    rng = random.Random(seed)
    device, waiting = golden.device(rng), [random_ask(golden, rng, i) for i in range(12)]
    running, done, num_shared = [], [], 0
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            running += device.enter(waiting.pop())
            continue
        group = rng.choice(running).group
        members = [row for row in running if row.group == group]
        members = rng.sample(members, rng.randint(1, min(len(members), image_launches.ROWS)))
        num_shared += len({row.step for row in members}) > 1
        device.step(*members)
        done += [row for row in running if row.is_done]
        running = [row for row in running if not row.is_done]
    assert num_shared > 0, "no launch had rows at different steps"
    assert len({row.group for row in done}) == 4
    products = [device.decode(row, output="latent")[0] for row in done]
    for row, latents in zip(done, products, strict=True):
        np.testing.assert_allclose(latents, alone(golden, row.request), atol=ATOL_ALONE)


@golden_pipelines.of_few
def test_noise_depends_on_the_seed_alone(golden):
    first = golden.ask(PROMPTS[1], seed=2**33 + 5, steps=3)
    others = [golden.ask(PROMPTS[2], seed=seed, steps=3) for seed in (5, 2**33, 6)]
    device = golden.device(random.Random(1))
    rows = device.enter(*others, first)
    products = device.finish(*rows, output="latent")
    np.testing.assert_allclose(products[3], alone(golden, first), atol=ATOL_ALONE)
    noises = [noise_of(golden, one) for one in (first, *others)]
    for i, one in enumerate(noises):
        assert abs(one.mean()) < 0.1 and abs(one.std() - 1) < 0.05
        assert all(np.abs(one - other).mean() > 0.5 for other in noises[:i])
    other_prompt = golden.ask(PROMPTS[0], seed=2**33 + 5, steps=2)
    np.testing.assert_allclose(noise_of(golden, other_prompt), noises[0], atol=ATOL_ALONE)


def noise_of(golden, request):
    """Returns the initial latents of a request, from what its first step made of them.

    Initial, next and clean latents lie on one line: at the noise levels 1, `after` and 0.
    """
    device = golden.device()
    (row,) = device.enter(request)
    device.step(row)
    before, after = golden.levels(request.image.num_inference_steps, row.size)[:2]
    assert before == pytest.approx(1.0, abs=1e-12)
    clean = device.decoded(row, output="latent")[0].frames[0].value
    return clean + (device.latents(row) - clean) / after


@golden_pipelines.of_few
def test_a_preview_is_the_decoded_prediction_of_its_step(golden):
    size, device = golden.sizes[0], golden.device()
    (row,) = device.enter(golden.ask(PROMPTS[2], latents=golden.initial(size, 2)))
    device.step(row)
    device.step(row)
    levels, steps = golden.levels(4, size), golden.steps_of(size, golden.plain_run, "p2")[:, 0]
    to_clean = levels[2] / (levels[1] - levels[2])
    # Along the velocity, down to noise level 0.
    expected = steps[1] + to_clean * (steps[1] - steps[0])
    ((latents,),) = (one.frames for one in device.decoded(row, output="latent"))
    np.testing.assert_allclose(latents.value, expected, atol=ATOL_LATENTS * (1 + 2 * to_clean))
    (result,) = device.decoded(row)
    assert result.product is None and [frame.step for frame in result.frames] == [2]
    model = golden.pipeline()
    decode = jax.jit(model.pipeline.decode, static_argnums=2)
    image = decode(model.params, jnp.asarray(latents.value)[None], size)
    pixels = np.clip(np.round(127.5 * np.asarray(image[0]) + 127.5), 0, 255)
    assert np.abs(result.frames[0].value - pixels).max() <= 1
    # A preview changes nothing.
    device.step(row)
    device.step(row)
    np.testing.assert_allclose(device.latents(row), steps[3], atol=ATOL_LATENTS)


@golden_pipelines.of_few
def test_a_row_of_nan_ends_alone(golden):
    size = golden.sizes[0]
    broken = golden.initial(size, 0).copy()
    broken.flat[500] = np.nan
    asks = [golden.ask(PROMPTS[j], latents=golden.initial(size, j)) for j in range(3)]
    expected = [alone(golden, one) for one in asks]
    asks[0] = golden.ask(PROMPTS[0], latents=broken)
    device = golden.device()
    rows = device.enter(*asks)
    for _ in range(4):
        assert [one.is_invalid for one in device.step(*rows)] == [True, False, False]
    latents, images = (device.decoded(*rows, output=output) for output in ("latent", "image"))
    for results in (latents, images):
        assert [one.is_invalid for one in results] == [True, False, False]
    num_compared = 0
    for j in (1, 2):
        np.testing.assert_allclose(latents[j].product, expected[j], atol=ATOL_ALONE)
        pixels = golden.pixels_of(size, golden.plain_run, f"p{j}")
        if pixels is not None:
            assert np.abs(images[j].product.astype(int) - pixels[0]).max() <= 1
            num_compared += 1
    assert num_compared
    # Its slot and its entry serve the next row.
    slot, (entry,) = rows[0].stay.slot, rows[0].stay.entries
    again = golden.ask(PROMPTS[1], seed=3)
    device = golden.device()
    device._slots.append(slot)
    device._entries.append(entry)
    (product,) = device.finish(*device.enter(again), output="latent")
    np.testing.assert_allclose(product, alone(golden, again), atol=ATOL_ALONE)


@golden_pipelines.of_few
def test_nan_in_a_caption_ends_its_rows_alone_and_leaves_nothing_in_the_entry(golden):
    device = golden.device()
    broken, other = device.enter(golden.ask(PROMPTS[2], seed=1), golden.ask(PROMPTS[0], seed=2))
    memory = device.runner._memory["captions"]
    (entry,) = broken.stay.entries
    device.runner._memory["captions"] = type(memory)(
        entries=jax.tree.map(lambda held: held.at[entry].set(float("nan")), memory.entries)
    )
    assert [one.is_invalid for one in device.step(broken, other)] == [True, False]
    # A short caption comes into the entry; attention weighs what is behind it with zero.
    device._entries.append(entry)
    short = golden.ask(PROMPTS[0], seed=9)
    (row,) = device.enter(short, rows=1, tokens=golden.short_tokens)
    assert row.stay.entries == (entry,)
    np.testing.assert_allclose(
        device.finish(row, output="latent")[0], alone(golden, short), atol=ATOL_ALONE
    )


@golden_pipelines.of_few
def test_nothing_compiles_after_the_start(golden):
    device = golden.device()
    device.finish(*device.enter(golden.ask()))  # small programs of the test itself, if any
    before = compile_counter.COUNTER.count
    first, second = golden.sizes
    for size, negative in ((first, None), (second, NEGATIVE), (first, NEGATIVE), (second, None)):
        latents = golden.initial(size, 0)
        rows = device.enter(
            golden.ask(size=size, negative=negative, seed=4),
            golden.ask(PROMPTS[2], size=size, negative=negative, latents=latents),
        )
        device.finish(*rows)
        device.decode(*rows, output="latent")
    assert compile_counter.COUNTER.count == before


@golden_pipelines.of_few
def test_memory_is_never_copied(golden):
    runner = golden.compiled()
    sizes = {
        name: [leaf.nbytes for leaf in jax.tree.leaves(part)]
        for name, part in runner._memory.items()
    }
    num_checked = 0
    for bucket, compiled in runner.compiled.items():
        parts = MEMORY_PARTS.get(bucket.name, list(sizes))
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(sum(sizes[part]) for part in parts), bucket
        if bucket.tokens == golden.long_tokens:
            continue  # what attention needs is as large as a copy
        # A part's largest array; small ones beside it are only known not to be given out anew.
        least = min(max(sizes[part]) for part in parts)
        # Windows of modulation are small: half of one is about what a step needs for itself.
        share = 1 if "modulations" in parts else 4
        extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert memory.temp_size_in_bytes + extra < least / share, bucket
        num_checked += 1
    assert num_checked > 6


@golden_pipelines.of_each
def test_latents_and_noise_levels_are_float32_whatever_the_weights_are(golden):
    model = loaded.load(golden.folder(), "bfloat16", devices.facts(), show_progress=False)
    assert {array.dtype for array in model.params.values()} == {jnp.dtype("bfloat16")}
    kind = ImageKind(model.pipeline, golden.config)
    memory = jax.eval_shape(kind.create_memory)
    largest = max(jax.tree.leaves(memory["captions"]), key=lambda leaf: leaf.size)
    assert largest.dtype == jnp.bfloat16
    size = golden.sizes[1]
    for bucket in (
        image_launches.step_bucket(size, is_guided=True, tokens=golden.tokens),
        image_launches.decode_bucket(size, "latent"),
    ):
        program = kind.program(bucket)
        empty = ScheduleBatch(rows=(), bucket=bucket)
        inputs = program.inputs(empty, interrupts.shapes())
        parts = {name: memory[name] for name in program.uses}
        after, outputs = jax.eval_shape(program.step, model.params, parts, inputs)
        assert after == parts
        assert {leaf.dtype for leaf in jax.tree.leaves(after["slots"])} == {jnp.dtype("float32")}
        assert outputs.value is None or outputs.value.dtype == jnp.float32
