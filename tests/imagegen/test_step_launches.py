"""Rows that share launches: each is what it would be alone, whatever the others do."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_images as golden
from support.golden_images import PROMPTS, SQUARE, TALL

from jdllm import device as device_lib
from jdllm.imagegen import kind as kind_lib
from jdllm.imagegen import loaded
from jdllm.runner.launch import compile_counter, interrupts
from jdllm.scheduler import batch as batch_lib

# Batched against alone inside one implementation; with guidance the reference has 4e-5.
ATOL_ALONE = 5e-5
ATOL_LATENTS = 6e-4  # against the goldens, see test_golden_runs.py
MEMORY_PARTS = {"encode": ["captions"], "begin": ["slots"], "decode": ["slots"]}


def alone(request):
    """Returns the final latents of a request that has the device to itself."""
    device = golden.Device()
    return device.finish(*device.enter(request), output="latent")[0]


def random_ask(rng, number):
    size = (SQUARE, TALL)[number % 2]
    options = {"scale": rng.choice([1.0, 2.5])} if number % 4 > 1 else {}
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


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_join_at_any_step_are_as_if_alone(seed):
    """Two sizes, guided and not, of different numbers of steps, in any slot and order."""
    rng = random.Random(seed)
    device, waiting = golden.Device(rng), [random_ask(rng, i) for i in range(12)]
    running, done, num_shared = [], [], 0
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            running += device.enter(waiting.pop())
            continue
        group = rng.choice(running).group
        members = [row for row in running if row.group == group]
        members = rng.sample(members, rng.randint(1, min(len(members), golden.ROWS)))
        num_shared += len({row.step for row in members}) > 1
        device.step(*members)
        done += [row for row in running if row.is_done]
        running = [row for row in running if not row.is_done]
    assert num_shared > 0, "no launch had rows at different steps"
    assert len({row.group for row in done}) == 4
    products = [device.decode(row, output="latent")[0] for row in done]
    for row, latents in zip(done, products, strict=True):
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
    """Returns the initial latents of a request, from what its first step made of them.

    Initial, next and clean latents lie on one line: at the noise levels 1, `after` and 0.
    """
    device = golden.Device()
    (row,) = device.enter(request)
    device.step(row)
    before, after = golden.schedule_of_goldens(request.image.num_inference_steps)[:2]
    assert before == 1.0
    clean = device.decoded(row, output="latent")[0].frames[0].value
    return clean + (device.latents(row) - clean) / after


def test_a_preview_is_the_decoded_prediction_of_its_step():
    device = golden.Device()
    (row,) = device.enter(golden.ask(PROMPTS[2], latents=golden.initial(SQUARE, 2)))
    device.step(row)
    device.step(row)
    levels = golden.schedule_of_goldens(4)
    x = golden.arrays()["96x96/g0/p2/latents_steps"][:2, 0]
    to_clean = levels[2] / (levels[1] - levels[2])
    expected = x[1] + to_clean * (x[1] - x[0])  # along the velocity, down to noise level 0
    ((latents,),) = (one.frames for one in device.decoded(row, output="latent"))
    np.testing.assert_allclose(latents.value, expected, atol=ATOL_LATENTS * (1 + 2 * to_clean))
    (result,) = device.decoded(row)
    assert result.product is None and [frame.step for frame in result.frames] == [2]
    model = golden.pipeline()
    decode = jax.jit(model.pipeline.decode, static_argnums=2)
    image = decode(model.params, jnp.asarray(latents.value)[None], SQUARE)
    pixels = np.clip(np.round(127.5 * np.asarray(image[0]) + 127.5), 0, 255)
    assert np.abs(result.frames[0].value - pixels).max() <= 1
    # A preview changes nothing.
    device.step(row)
    device.step(row)
    last = golden.arrays()["96x96/g0/p2/latents_steps"][3, 0]
    np.testing.assert_allclose(device.latents(row), last, atol=ATOL_LATENTS)


def test_a_row_of_nan_ends_alone():
    broken = golden.initial(SQUARE, 0).copy()
    broken[3, 5, 7] = np.nan
    asks = [golden.ask(PROMPTS[j], latents=golden.initial(SQUARE, j)) for j in range(3)]
    expected = [alone(one) for one in asks]
    asks[1] = golden.ask(PROMPTS[1], latents=broken)
    device = golden.Device()
    rows = device.enter(*asks)
    for _ in range(4):
        assert [one.is_invalid for one in device.step(*rows)] == [False, True, False]
    latents, images = (device.decoded(*rows, output=output) for output in ("latent", "image"))
    for results in (latents, images):
        assert [one.is_invalid for one in results] == [False, True, False]
    for j in (0, 2):
        np.testing.assert_allclose(latents[j].product, expected[j], atol=ATOL_ALONE)
        pixels = golden.arrays()[f"96x96/g0/p{j}/uint8"][0]
        assert np.abs(images[j].product.astype(int) - pixels).max() <= 1
    # Its slot and its entry serve the next row.
    slot, (entry,) = rows[1].stay.slot, rows[1].stay.entries
    again = golden.ask(PROMPTS[1], seed=3)
    device = golden.Device()
    device._slots.append(slot)
    device._entries.append(entry)
    (product,) = device.finish(*device.enter(again), output="latent")
    np.testing.assert_allclose(product, alone(again), atol=ATOL_ALONE)


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


def test_latents_and_noise_levels_are_float32_whatever_the_weights_are():
    model = loaded.load(golden.folder(), "bfloat16", device_lib.facts(), show_progress=False)
    assert {array.dtype for array in model.params.values()} == {jnp.dtype("bfloat16")}
    kind = kind_lib.ImageKind(model.pipeline, golden.CONFIG)
    memory = jax.eval_shape(kind.create_memory)
    assert memory["captions"].entries.dtype == jnp.bfloat16
    for bucket in (golden.step_bucket(TALL, is_guided=True), golden.decode_bucket(TALL, "latent")):
        program = kind.program(bucket)
        empty = batch_lib.ScheduleBatch(rows=(), bucket=bucket)
        inputs = program.inputs(empty, interrupts.shapes())
        parts = {name: memory[name] for name in program.uses}
        after, outputs = jax.eval_shape(program.step, model.params, parts, inputs)
        assert after == parts
        assert {leaf.dtype for leaf in jax.tree.leaves(after["slots"])} == {jnp.dtype("float32")}
        assert outputs.value is None or outputs.value.dtype == jnp.float32
