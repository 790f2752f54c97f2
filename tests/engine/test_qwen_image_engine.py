"""Qwen-Image offline: golden runs, images of unequal prompts, negative prompts and their scale."""

from __future__ import annotations

import numpy as np
import pytest
from support import image_engine, step_cache_oracle
from support.golden_qwen_image import GOLDEN, PREFIX, SIZES
from support.image_launches import NEGATIVE, PROMPTS

from jdllm import errors

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

ATOL_LATENTS = 6e-4  # that of `pipelines/test_golden_runs.py`
ATOL_ALONE = 5e-5  # launches of other sizes round differently
SIZE = {"height": 80, "width": 80, "use_tqdm": False}
QUICK = {**SIZE, "num_inference_steps": 2}
GUIDED = {"negative_prompt": NEGATIVE, "true_cfg_scale": 4.0}


def generate(prompts, **options):
    return image_engine.qwen_image().generate(prompts, **options)


def given(*places):
    latents = np.stack([GOLDEN.initial(SIZES[0], j) for j in places])
    return {"latents": latents, "num_inference_steps": 4, **SIZE}


def expected(run, *places):
    return np.concatenate([GOLDEN.steps_of(SIZES[0], run, f"p{j}")[3] for j in places])


def test_golden_runs_of_several_prompts():
    """The first prompt is empty."""
    found = generate(PROMPTS, output_type="latent", **given(0, 1, 2))
    assert found.dtype == np.float32 and found.shape == (3, 25, 64)
    np.testing.assert_allclose(found, expected("nocfg", 0, 1, 2), atol=ATOL_LATENTS)
    (image,) = generate(PROMPTS[1], **given(1))
    (values,) = generate(PROMPTS[1], output_type="np", **given(1))
    pixels = GOLDEN.pixels_of(SIZES[0], "nocfg", "p1")[0]
    assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1
    assert np.abs(255 * values - pixels).max() <= 1.01


def test_golden_runs_with_a_negative_prompt():
    found = generate(PROMPTS[1:], output_type="latent", **GUIDED, **given(1, 2))
    np.testing.assert_allclose(found, expected("cfg4", 1, 2), atol=ATOL_LATENTS)
    # 4 is the default; negative prompts may differ, and one may be empty.
    found = generate(
        [PROMPTS[1], PROMPTS[2]], negative_prompt=[" ", ""], output_type="latent", **given(1, 2)
    )
    spaces = np.concatenate([expected("cfg4_space", 1), expected("cfg4_empty", 2)])
    np.testing.assert_allclose(found, spaces, atol=ATOL_LATENTS)


def test_steps_beyond_a_window_of_modulation_are_those_of_a_plain_loop():
    """The loop makes the modulation of each step by itself; another image ends on the way."""
    size, steps = SIZES[0], [10, 3]
    asked = GOLDEN.ask(
        PROMPTS[1], size=size, steps=10, latents=GOLDEN.initial(size, 1), negative=NEGATIVE
    )
    expected = step_cache_oracle.run(GOLDEN, asked, threshold=0.0).latents[-1]
    options = {**given(1, 2), **GUIDED, "num_inference_steps": steps}
    found = generate(PROMPTS[1:], output_type="latent", **options)
    np.testing.assert_allclose(found[0], expected, atol=ATOL_LATENTS)


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
def test_images_of_unequal_prompts_are_as_if_alone(guidance):
    """Two of each prompt, where diffusers 0.42.1 gives embeddings the padding of others."""
    prompts = [PROMPTS[1], PROMPTS[2]]
    found = generate(
        prompts, num_images_per_prompt=2, seed=5, output_type="latent", **guidance, **QUICK
    )
    for i, latents in enumerate(found):
        (alone,) = generate(prompts[i // 2], seed=5 + i, output_type="latent", **guidance, **QUICK)
        np.testing.assert_allclose(latents, alone, atol=ATOL_ALONE)
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_without_a_negative_prompt_nothing_is_guided():
    plain = generate("a cat", seed=1, output_type="latent", **QUICK)
    off = generate("a cat", seed=1, negative_prompt="", true_cfg_scale=1.0, output_type="latent",
                   **QUICK)  # fmt: skip
    np.testing.assert_array_equal(plain, off)
    on = generate("a cat", seed=1, negative_prompt="", output_type="latent", **QUICK)
    assert np.abs(plain - on).max() > 0.01


def test_facts_and_defaults():
    engine = image_engine.qwen_image()
    facts = engine.facts
    assert (facts.family, facts.default_steps, facts.default_true_cfg_scale) == ("QwenImage", 50, 4)
    assert (facts.default_max_sequence_length, facts.max_sequence_length) == (512, 1024)
    assert facts.packs_latents and facts.latents_shape(80, 112) == (35, 64)
    assert facts.default_guidance_scale is None and not facts.has_cfg_limits
    assert engine.model_info()["preferred_sampling_params"]["true_cfg_scale"] == 4.0


def test_prompts_are_cut_behind_the_prefix():
    whole = GOLDEN.ids_of(PROMPTS[2])
    assert len(whole) > PREFIX + 20
    short = generate(PROMPTS[2], max_sequence_length=20, seed=1, output_type="latent", **QUICK)
    long = generate(PROMPTS[2], seed=1, output_type="latent", **QUICK)
    assert np.abs(short - long).max() > 0.01


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("true_cfg_scale", {"true_cfg_scale": 4.0}),
        ("negative_prompt", {"negative_prompt": "fog", "true_cfg_scale": 1.0}),
        ("guidance_scale", {"guidance_scale": 3.5}),
        ("cfg_normalization", {"cfg_normalization": True, **GUIDED}),
        ("max_sequence_length", {"max_sequence_length": 1025}),
        ("height", {"height": 88}),
        ("latents", {"latents": np.zeros((1, 16, 10, 10), np.float32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_options_are_named(param, options):
    with pytest.raises(errors.RequestError) as caught:
        generate("a cat", **{**QUICK, **options})
    assert caught.value.param == param
