"""Whole runs of the golden Z-Image pipeline on the real runner, against diffusers 0.42.1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import golden_images as golden
from support.golden_images import SQUARE, TALL

# Measured by the makers of the arrays, with guidance: 1.7e-4 for an independent implementation.
ATOL_LATENTS = 6e-4
RUNS = {
    "g0": {},
    "g2.5": {"scale": 2.5},
    "g2.5_noneg": {"scale": 2.5, "negative": ""},
    "g2.5_trunc0.5_norm1": {"scale": 2.5, "truncation": 0.5, "normalization": 1.0},
}


def name_of(size, run, who):
    return f"{size[0]}x{size[1]}/{run}/{who}"


def requests(size, run, prompts):
    return [
        golden.ask(golden.PROMPTS[j], size=size, latents=golden.initial(size, j), **RUNS[run])
        for j in prompts
    ]


def found_runs():
    """Returns (size, run, prompts) of each golden run, alone and together."""
    found = []
    for size, run in itertools.product((SQUARE, TALL), RUNS):
        for who, prompts in (*((f"p{j}", [j]) for j in range(3)), ("batch", [0, 1, 2])):
            if f"{name_of(size, run, who)}/latents_steps" in golden.arrays():
                found.append(pytest.param(size, run, who, prompts, id=name_of(size, run, who)))
    return found


def test_every_golden_run_is_tested():
    stored = {name.rpartition("/")[0] for name in golden.arrays() if name.count("/") == 3}
    assert stored == {param.id for param in found_runs()} and len(stored) == 13


@pytest.mark.parametrize(("size", "run", "who", "prompts"), found_runs())
def test_is_the_run_of_diffusers(size, run, who, prompts):
    expected = golden.arrays()
    name = name_of(size, run, who)
    device = golden.Device()
    rows = device.enter(*requests(size, run, prompts))
    for after in expected[f"{name}/latents_steps"]:
        assert not any(result.is_invalid for result in device.step(*rows))
        for row, latents in zip(rows, after, strict=True):
            np.testing.assert_allclose(device.latents(row), latents, atol=ATOL_LATENTS)
    assert all(row.is_done for row in rows)
    for image, pixels in zip(device.decode(*rows), expected[f"{name}/uint8"], strict=True):
        assert image.dtype == np.uint8 and image.shape == pixels.shape
        off = np.abs(image.astype(int) - pixels)
        assert off.max() <= 1 and (off > 0).mean() < 5e-3


@pytest.mark.parametrize("tokens", [32, golden.TOKENS])
def test_buckets_of_one_row_and_of_short_captions_give_the_same(tokens):
    device = golden.Device()
    # The caption comes from a launch for short captions, too.
    (row,) = device.enter(*requests(SQUARE, "g0", [1]), rows=1, tokens=32)
    for after in golden.arrays()[f"{name_of(SQUARE, 'g0', 'p1')}/latents_steps"]:
        device.step(row, bucket_rows=1, tokens=tokens)
        np.testing.assert_allclose(device.latents(row), after[0], atol=ATOL_LATENTS)


@pytest.mark.parametrize("size", [SQUARE, TALL], ids=str)
def test_the_latents_of_a_finished_row_are_its_output(size):
    device = golden.Device()
    rows = device.enter(*requests(size, "g0", [0, 2]))
    products = device.finish(*rows, output="latent")
    for row, latents in zip(rows, products, strict=True):
        assert latents.dtype == np.float32
        np.testing.assert_allclose(latents, device.latents(row), atol=1e-6)
