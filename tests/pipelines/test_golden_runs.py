"""Whole runs of the golden pipelines on the real runner, against diffusers 0.42.1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import golden_pipelines
from support.image_launches import PROMPTS

# Measured by the makers of the arrays, with guidance: 1.7e-4 for an independent implementation.
ATOL_LATENTS = 6e-4
TOGETHER = "batch"


def requests(golden, size, run, prompts):
    return [
        golden.ask(PROMPTS[j], size=size, latents=golden.initial(size, j), **golden.runs[run])
        for j in prompts
    ]


def alone(golden, size, run):
    """Returns the prompts of which a golden run alone is stored."""
    prefix = f"{size[0]}x{size[1]}/{run}"
    return [j for j in range(3) if f"{prefix}/p{j}/latents_steps" in golden.arrays()]


def found_runs():
    """Returns (golden, size, run, prompts) of each golden run, alone and together."""
    found = []
    for golden in golden_pipelines.PIPELINES:
        for size, run in itertools.product(golden.sizes, golden.runs):
            name = f"{golden.name}/{size[0]}x{size[1]}/{run}"
            groups = {f"p{j}": [j] for j in alone(golden, size, run)}
            if f"{size[0]}x{size[1]}/{run}/{TOGETHER}/latents_steps" in golden.arrays():
                groups[TOGETHER] = [0, 1, 2]
            elif len(groups) > 1:
                groups[TOGETHER] = alone(golden, size, run)
            for who, prompts in groups.items():
                params = golden, size, run, who, prompts
                others = golden is not golden_pipelines.PIPELINES[0]
                marks = [pytest.mark.campaign] if others else []
                found.append(pytest.param(*params, id=f"{name}/{who}", marks=marks))
    return found


def expected_of(golden, size, run, who, prompts):
    """Returns the golden latents after each step, and images or None for each prompt.

    What is not stored for a batch is what each prompt gives alone.
    """
    if who == TOGETHER and f"{size[0]}x{size[1]}/{run}/{who}/latents_steps" not in golden.arrays():
        names = [f"p{j}" for j in prompts]
    else:
        names = [who]
    steps = np.concatenate([golden.steps_of(size, run, name) for name in names], axis=1)
    images = [golden.pixels_of(size, run, name) for name in names]
    return steps, [one for group in images for one in (group if group is not None else [None])]


@golden_pipelines.of_each
def test_every_golden_run_is_tested(golden):
    stored = {
        f"{golden.name}/{name.rpartition('/')[0]}"
        for name in golden.arrays()
        if name.count("/") == 3
    }
    found = {param.id for param in found_runs() if param.values[0] is golden}
    assert stored and stored <= found
    assert all(param.endswith(f"/{TOGETHER}") for param in found - stored)


@pytest.mark.parametrize(("golden", "size", "run", "who", "prompts"), found_runs())
def test_is_the_run_of_diffusers(golden, size, run, who, prompts):
    steps, images = expected_of(golden, size, run, who, prompts)
    assert len(images) == len(prompts)
    device = golden.device()
    rows = device.enter(*requests(golden, size, run, prompts))
    for after in steps:
        assert not any(result.is_invalid for result in device.step(*rows))
        for row, latents in zip(rows, after, strict=True):
            np.testing.assert_allclose(device.latents(row), latents, atol=ATOL_LATENTS)
    assert all(row.is_done for row in rows)
    for image, pixels in zip(device.decode(*rows), images, strict=True):
        assert image.dtype == np.uint8 and image.shape == (*size, 3)
        if pixels is not None:
            off = np.abs(image.astype(int) - pixels)
            assert off.max() <= 1 and (off > 0).mean() < 5e-3


@pytest.mark.parametrize("is_short", [True, False], ids=["short", "long"])
@golden_pipelines.of_few
def test_buckets_of_one_row_and_of_short_captions_give_the_same(golden, is_short):
    size, device = golden.sizes[0], golden.device()
    # The caption comes from a launch for short captions, too.
    asked = requests(golden, size, golden.plain_run, [1])
    (row,) = device.enter(*asked, rows=1, tokens=golden.short_tokens)
    tokens = golden.short_tokens if is_short else golden.tokens
    for after in golden.steps_of(size, golden.plain_run, "p1"):
        device.step(row, bucket_rows=1, tokens=tokens)
        np.testing.assert_allclose(device.latents(row), after[0], atol=ATOL_LATENTS)


@pytest.mark.parametrize("place", [0, 1])
@golden_pipelines.of_few
def test_the_latents_of_a_finished_row_are_its_output(golden, place):
    device = golden.device()
    rows = device.enter(*requests(golden, golden.sizes[place], golden.plain_run, [0, 2]))
    products = device.finish(*rows, output="latent")
    for row, latents in zip(rows, products, strict=True):
        assert latents.dtype == np.float32
        np.testing.assert_allclose(latents, device.latents(row), atol=1e-6)
