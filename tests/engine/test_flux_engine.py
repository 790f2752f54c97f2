"""FLUX.1 offline: golden runs, images of unequal prompts, both kinds of guidance, schnell."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support import golden_flux, image_engine, step_cache_oracle
from support.golden_flux import CLIP_IDS, GOLDEN, SQUARE
from support.image_launches import NEGATIVE, PROMPTS

import jdllm
from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

ATOL_LATENTS = 6e-4  # that of `pipelines/test_golden_runs.py`
ATOL_ALONE = 5e-5  # launches of other sizes round differently
SIZE = {"height": 96, "width": 96, "use_tqdm": False}
QUICK = {**SIZE, "num_inference_steps": 2}
GUIDED = {"negative_prompt": NEGATIVE, "true_cfg_scale": 2.0}
SHORT = {"max_sequence_length": golden_flux.LENGTH}  # that of most golden runs


def generate(prompts, **options):
    return image_engine.flux().generate(prompts, **options)


def given(*places):
    latents = np.stack([GOLDEN.initial(SQUARE, j) for j in places])
    return {"latents": latents, "num_inference_steps": 4, **SIZE}


def expected(run, *places):
    return np.concatenate([GOLDEN.steps_of(SQUARE, run, f"p{j}")[3] for j in places])


def test_golden_runs_of_several_prompts():
    """The first prompt is empty."""
    found = generate(PROMPTS, output_type="latent", **SHORT, **given(0, 1, 2))
    assert found.dtype == np.float32 and found.shape == (3, 36, 64)
    np.testing.assert_allclose(found, expected("g3.5", 0, 1, 2), atol=ATOL_LATENTS)


def test_golden_runs_of_the_default_length():
    """Pads of a prompt count, so a golden run of 64 of them is another image."""
    (latents,) = generate(PROMPTS[1], output_type="latent", **given(1))
    np.testing.assert_allclose(latents, expected("g3.5_len512", 1)[0], atol=ATOL_LATENTS)
    assert np.abs(latents - expected("g3.5", 1)[0]).max() > 0.1
    (image,) = generate(PROMPTS[1], **given(1))
    pixels = GOLDEN.pixels_of(SQUARE, "g3.5_len512", "p1")[0]
    assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1


def test_golden_runs_with_a_negative_prompt():
    (latents,) = generate(PROMPTS[2], output_type="latent", **GUIDED, **SHORT, **given(2))
    np.testing.assert_allclose(latents, expected("g3.5_truecfg2", 2)[0], atol=ATOL_LATENTS)


def test_steps_beyond_a_window_of_modulation_are_those_of_a_plain_loop():
    """The loop makes the modulation of each step by itself; another image ends on the way."""
    size, steps = SQUARE, [9, 3]
    asked = GOLDEN.ask(
        PROMPTS[1], size=size, steps=9, latents=GOLDEN.initial(size, 1), negative=NEGATIVE
    )
    expected = step_cache_oracle.run(GOLDEN, asked, threshold=0.0).latents[-1]
    options = {**given(1, 2), **GUIDED, **SHORT, "num_inference_steps": steps}
    found = generate(PROMPTS[1:], output_type="latent", **options)
    np.testing.assert_allclose(found[0], expected, atol=ATOL_LATENTS)


@pytest.mark.parametrize("guidance", [{}, GUIDED], ids=["plain", "guided"])
def test_images_of_unequal_prompts_and_lengths_are_as_if_alone(guidance):
    prompts, lengths = [PROMPTS[1], PROMPTS[2], PROMPTS[2]], [512, 512, 64]
    found = generate(
        prompts, max_sequence_length=lengths, seed=5, output_type="latent", **guidance, **QUICK
    )
    for i, latents in enumerate(found):
        (alone,) = generate(
            prompts[i], max_sequence_length=lengths[i], seed=5 + i, output_type="latent",
            **guidance, **QUICK,
        )  # fmt: skip
        np.testing.assert_allclose(latents, alone, atol=ATOL_ALONE)


def test_scales_are_of_each_image():
    """The default is 3.5, and 0 is a scale like any other."""
    found = generate(
        ["a cat"] * 3, guidance_scale=[3.5, 0.0, 7.0], seed=[1, 1, 1], output_type="latent", **QUICK
    )
    plain = generate("a cat", seed=1, output_type="latent", **QUICK)
    np.testing.assert_allclose(found[:1], plain, atol=ATOL_ALONE)
    assert np.abs(found[0] - found[1]).max() > 0.1 and np.abs(found[0] - found[2]).max() > 0.1


def test_without_a_true_scale_nothing_is_guided():
    plain = generate("a cat", seed=1, output_type="latent", **QUICK)
    off = generate("a cat", seed=1, negative_prompt="", output_type="latent", **QUICK)
    np.testing.assert_array_equal(plain, off)
    on = generate("a cat", seed=1, negative_prompt="", true_cfg_scale=2.0, output_type="latent",
                  **QUICK)  # fmt: skip
    assert np.abs(plain - on).max() > 0.01


def test_facts_and_defaults():
    engine = image_engine.flux()
    facts = engine.facts
    assert (facts.family, facts.default_steps, facts.default_guidance_scale) == ("Flux", 28, 3.5)
    assert (facts.default_max_sequence_length, facts.max_sequence_length) == (512, 512)
    assert facts.packs_latents and facts.latents_shape(96, 112) == (42, 64)
    assert facts.default_true_cfg_scale == 1.0 and not facts.has_cfg_limits
    assert engine.model_info()["preferred_sampling_params"]["guidance_scale"] == 3.5


def test_the_memory_of_modulation_is_reported():
    """Float32 vectors of 7 of the 28 steps, of two captions of each image that may run."""
    engine = image_engine.flux()
    config = GOLDEN.pipeline().pipeline.parts.configs["transformer"]
    vectors = config.num_layers * 2 * 6 + config.num_single_layers * 3 + 2
    expected = engine.max_running_requests * 2 * 7 * vectors * config.dim * 4
    assert engine.stats().modulation_memory_usage_gb == pytest.approx(expected / 1e9)
    assert engine.server_info()["internal_states"][0]["modulation_memory_usage_gb"] > 0


def test_a_prompt_that_is_cut_is_another():
    short = generate(PROMPTS[2], max_sequence_length=20, seed=1, output_type="latent", **QUICK)
    long = generate(PROMPTS[2], seed=1, output_type="latent", **QUICK)
    assert np.abs(short - long).max() > 0.01


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("true_cfg_scale", {"true_cfg_scale": 2.0}),
        ("negative_prompt", {"negative_prompt": "fog"}),
        ("negative_prompt", {"negative_prompt": "fog", "true_cfg_scale": 1.0}),
        ("guidance_scale", {"guidance_scale": -1.0}),
        ("cfg_truncation", {"cfg_truncation": 0.5, **GUIDED}),
        ("cfg_normalization", {"cfg_normalization": True, **GUIDED}),
        ("max_sequence_length", {"max_sequence_length": 513}),
        ("max_sequence_length", {"max_sequence_length": 0}),
        ("height", {"height": 88}),
        ("width", {"width": 8208}),
        ("latents", {"latents": np.zeros((1, 16, 12, 12), np.float32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_options_are_named(param, options):
    with pytest.raises(errors.RequestError) as caught:
        generate("a cat", **{**QUICK, **options})
    assert caught.value.param == param


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    """Returns an engine for the golden sizes as schnell has them, with random weights."""
    folder = shutil.copytree(golden_flux.STORED, tmp_path_factory.mktemp("schnell") / "pipeline")
    for name, changes in {
        "transformer/config.json": {"guidance_embeds": False},
        "scheduler/scheduler_config.json": {"use_dynamic_shifting": False, "shift": 1.0},
    }.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with jdllm.ImageEngine(
        model_path=str(folder), load_format="dummy", warmup_resolutions="64x64",
        max_image_pixels=64 * 64, batching_max_size=1,
    ) as engine:  # fmt: skip
        yield engine


def test_schnell_takes_four_steps_and_no_scale(schnell):
    facts = schnell.facts
    assert (facts.default_steps, facts.default_guidance_scale) == (4, None)
    assert (facts.default_max_sequence_length, facts.max_sequence_length) == (256, 256)
    made = {"height": 64, "width": 64, "seed": 3, "output_type": "latent", "use_tqdm": False}
    plain = schnell.generate("a cat", **made)
    assert schnell.stats().denoising_steps_total == 4
    np.testing.assert_array_equal(schnell.generate("a cat", guidance_scale=0.0, **made), plain)
    for param, value in (("guidance_scale", 3.5), ("max_sequence_length", 257)):
        with pytest.raises(errors.RequestError) as caught:
            schnell.generate("a cat", **{param: value}, **made)
        assert caught.value.param == param
    assert schnell.stats().prompt_tokens_total == 2 * (CLIP_IDS + 256)
