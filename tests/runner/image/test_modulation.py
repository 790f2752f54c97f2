"""Modulation that is made before steps is what each step would make for itself; its memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_flux, golden_images, golden_qwen_image, image_launches
from support import published_pipelines as published
from support.image_launches import NEGATIVE, PROMPTS

from jdllm.device import devices
from jdllm.pipelines import interface, loaded
from jdllm.runner.image import programs, sizes, state
from jdllm.runner.image.kind import ImageKind
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.image import buckets

AHEAD = (golden_flux.GOLDEN, golden_qwen_image.GOLDEN)
# Of vectors of about 1: products of other sizes add up in another order. In 16 bits that may round
# an input of the last product to the number beside it.
ATOL = {"float32": 2e-6, "bfloat16": 2e-4}
SLOTS, ENTRIES, STEPS = (3, 1), ((2, 0), (1, 3)), 3


def captions_of(pipeline, tokens):
    """Returns four captions: random numbers."""
    keys = iter(jax.random.split(jax.random.key(0), 2))
    return jax.tree.map(
        lambda one: jax.random.normal(next(keys), (4, *one.shape), one.dtype),
        pipeline.caption_shapes(tokens),
    )


def guidance_of(image):
    return interface.Guidance(
        **{
            field.name: jnp.array([getattr(image, field.name)], jnp.float32)
            for field in dataclasses.fields(interface.Guidance)
        }
    )


def modulated(golden, model, asks, first_steps):
    """Returns the windows in memory after a launch for requests in SLOTS with captions ENTRIES."""
    config = dataclasses.replace(golden.config, num_slots=4, num_entries=4, window_steps=STEPS)
    kind = ImageKind(model.pipeline, config)
    memory = kind.create_memory()
    captions = captions_of(model.pipeline, config.max_tokens)
    memory["captions"] = state.Captions(entries=captions)
    rows = []
    for one, slot, entries, step in zip(asks, SLOTS, ENTRIES, first_steps, strict=True):
        stay = image_launches.Row(one, slot, entries).stay
        rows.append(buckets.ModulateRow(request=one, stay=stay, step=step))
    passes = programs.passes_of(model.pipeline.modulation)
    bucket = buckets.ModulateBucket(rows=4, num_passes=passes)
    program = kind.program(bucket)
    batch = ScheduleBatch(rows=tuple(rows), bucket=bucket)
    inputs = program.inputs(batch, interrupts.shapes())
    parts = {name: memory[name] for name in program.uses}
    after, outputs = jax.jit(program.step)(model.params, parts, inputs)
    assert not outputs.is_invalid.any()
    return after["modulations"].windows, captions


FLUX, QWEN_IMAGE = AHEAD


@pytest.mark.parametrize(
    ("golden", "dtype"),
    [(FLUX, "float32"), (FLUX, "bfloat16"), (QWEN_IMAGE, "bfloat16")],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_a_window_holds_what_each_of_its_steps_would_make(golden, dtype):
    """Of both captions of guided rows, and for rows at other steps of other schedules."""
    size = golden.sizes[0]
    model = loaded.load(golden.folder(), dtype, devices.facts(), show_progress=False)
    asks = [golden.ask(PROMPTS[1], steps=steps, size=size, negative=NEGATIVE) for steps in (5, 2)]
    windows, captions = modulated(golden, model, asks, first_steps=(1, 0))
    passes = programs.passes_of(model.pipeline.modulation)
    assert passes == (2 if golden is FLUX else 1)
    make, off = jax.jit(model.pipeline.modulation.make), 0.0
    for one, slot, entries, first in zip(asks, SLOTS, ENTRIES, (1, 0), strict=True):
        levels = model.pipeline.sigmas(one.image.num_inference_steps, *size)[first:-1]
        for number, entry in enumerate(entries[:passes]):
            caption = jax.tree.map(lambda leaf, at=entry: leaf[at : at + 1], captions)
            for place, sigma in enumerate(levels[:STEPS]):
                level = jnp.array([sigma], jnp.float32)
                expected = make(model.params, level, caption, guidance_of(one.image))
                for leaf, wanted in zip(*map(jax.tree.leaves, (windows, expected)), strict=True):
                    assert leaf.dtype == jnp.float32 and np.abs(wanted).max() > 0.1
                    found = leaf[slot * passes + number, place]
                    np.testing.assert_allclose(found, wanted[0], atol=ATOL[dtype])
                    off = max(off, np.abs(wanted - wanted.astype(jnp.bfloat16)).max())
    assert off > 5 * ATOL[dtype], "rounded to 16 bits it would be another"
    # Slots of no row keep what they had.
    for leaf in jax.tree.leaves(windows):
        assert not leaf[: passes * 1].any() and not leaf[passes * 2 : passes * 3].any()


def test_bytes_of_windows_are_those_of_the_arrays():
    for golden in (*AHEAD, golden_images.GOLDEN):
        pipeline, config = golden.pipeline().pipeline, golden.config
        windows = sizes.windows(pipeline, (1,), config.num_slots, None)
        if windows is not None:
            config = dataclasses.replace(config, window_steps=windows.steps)
        memory = jax.eval_shape(ImageKind(pipeline, config).create_memory)
        leaves = jax.tree.leaves(memory.get("modulations", ()))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        assert held == config.num_slots * sizes.window_bytes(pipeline, windows)
        assert (held == 0) == (golden is golden_images.GOLDEN)


# Vectors of 3072 float32 of one step: 6 for both streams of a double block, 3 for a single one, 2
# behind all. The steps of windows divide 28, 4 and 50 evenly, with at most 8.
FLUX_BYTES = (19 * 2 * 6 + 38 * 3 + 2) * 3072 * 4
QWEN_BYTES = (60 * 2 * 6 + 2) * 3072 * 4


@pytest.mark.parametrize(
    ("name", "steps", "step_bytes"),
    [
        ("flux-1-dev", 7, 2 * FLUX_BYTES),  # of two captions
        ("flux-1-schnell", 4, 2 * FLUX_BYTES),
        ("qwen-image", 8, QWEN_BYTES),
    ],
)
def test_windows_of_the_published_sizes(name, steps, step_bytes):
    pipeline = published.read(name).pipeline

    def windows(num_slots, free_bytes=None):
        return sizes.windows(pipeline, (1, 2), num_slots, free_bytes)

    found = windows(32)
    assert (found.steps, found.rows) == (steps, (1, 2))
    assert found.by_caption == (name != "qwen-image")
    assert sizes.window_bytes(pipeline, found) == steps * step_bytes
    # A quarter of what is free is for windows; one step is the least.
    assert windows(32, 4 * 32 * steps * step_bytes).steps == steps
    assert windows(32, 4 * 32 * steps * step_bytes - 4).steps == steps - 1
    assert windows(32, 0).steps == 1
    # Every array has indices of 32 bits.
    largest = max(leaf.size for leaf in jax.tree.leaves(pipeline.modulation.shapes))
    for num_slots in (32, 1000, 2500):
        assert 2 * num_slots * windows(num_slots).steps * largest < 2**31
    assert windows(2500).steps < steps or name != "flux-1-dev"


def test_z_image_has_none():
    pipeline = published.read("z-image-turbo").pipeline
    assert pipeline.modulation is None and sizes.windows(pipeline, (1,), 32, None) is None
