"""An engine with a step cache, with the bundled model: what callers see of it."""

from __future__ import annotations

import numpy as np
import pytest
from support import image_engine

import jdllm
from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

CAPTIONS = ("a red circle on a white ground", "two blue squares on a yellow ground")
STEPS = 6
SAME = {"height": 64, "width": 64, "guidance_scale": 0.0, "num_inference_steps": STEPS}
ATOL = 5e-5  # launches of other sizes round differently


@pytest.fixture(scope="module")
def engine():
    options = {"warmup_resolutions": "64x64", "batching_max_size": 2, "max_running_requests": 2}
    with jdllm.ImageEngine(enable_step_cache=True, max_image_pixels=64 * 64, **options) as engine:
        yield engine


def generate(engine, prompts, **options):
    return engine.generate(prompts, use_tqdm=False, **{**SAME, "seed": 3, **options})


def test_images_tell_how_many_steps_they_skipped(engine):
    before = engine.stats()
    (plain,) = generate(engine, CAPTIONS[0])
    (all_skipped,) = generate(engine, CAPTIONS[0], residual_diff_threshold=1.0)
    (off,) = generate(engine, CAPTIONS[0], residual_diff_threshold=0)
    told = {"seed": 3, "num_inference_steps": STEPS, "truncated_tokens": 0}
    assert plain.info == off.info == told | {"num_skipped_steps": 0}
    # A trained model's change between neighbouring steps is less than what changes.
    assert all_skipped.info == told | {"num_skipped_steps": STEPS - 1}
    assert np.array_equal(plain, off) and not np.array_equal(plain, all_skipped)
    after = engine.stats()
    assert after.skipped_steps_total - before.skipped_steps_total == STEPS - 1
    assert after.denoising_steps_total - before.denoising_steps_total == 3 * STEPS
    assert after.merged_steps_total == before.merged_steps_total


def test_images_with_and_without_a_cache_are_what_they_are_alone(engine):
    thresholds = (None, 0.25, 1.0)
    prompts = (CAPTIONS[0], *CAPTIONS)
    same = {"output_type": "latent"}
    together = generate(engine, prompts, residual_diff_threshold=thresholds, **same)
    for place, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True)):
        given = {"residual_diff_threshold": threshold, "seed": 3 + place, **same}
        (alone,) = generate(engine, prompt, **given)
        np.testing.assert_allclose(together[place], alone, atol=ATOL)


def test_its_memory_is_reported(engine):
    """Two passes, two arrays, float32, a token for each patch of 2 x 2 latents."""
    width = engine._built.pipeline.transformer_width
    tokens = 64 * 64 // engine.facts.size_multiple**2
    expected = 2 * 2 * 2 * 4 * tokens * width
    assert engine.stats().step_cache_memory_usage_gb == pytest.approx(expected / 1e9)
    assert image_engine.shared().stats().step_cache_memory_usage_gb == 0


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.1", True, float("nan")])
def test_wrong_thresholds_are_named(engine, value):
    with pytest.raises(errors.RequestError) as caught:
        generate(engine, CAPTIONS[0], residual_diff_threshold=value)
    assert caught.value.param == "residual_diff_threshold"


def test_an_engine_without_the_option_refuses_a_threshold():
    with pytest.raises(errors.RequestError, match="--enable-step-cache") as caught:
        image_engine.shared().generate(
            "a cat", height=96, width=96, residual_diff_threshold=0.1, use_tqdm=False
        )
    assert caught.value.param == "residual_diff_threshold"
