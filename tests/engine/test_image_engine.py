"""`jdllm.ImageEngine`: images offline, against diffusers 0.42.1 and against themselves."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support import golden_images as golden
from support import image_engine
from support.golden_images import PROMPTS, SQUARE

import jdllm
from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine.start.images import options as image_options
from jdllm.options import config
from jdllm.pipelines import folder

ATOL_LATENTS = 6e-4  # that of `pipelines/test_golden_runs.py`
SMALL = {"height": 96, "width": 96, "use_tqdm": False}
QUICK = {**SMALL, "num_inference_steps": 2}
RULE = {"model_contains": "/", "resolution": "128x128", "max_batch_size": 1}


def generate(prompts, **options):
    return image_engine.shared().generate(prompts, **options)


def golden_latents(run, name):
    return golden.arrays()[f"96x96/{run}/{name}/latents_steps"][3]


def initial(*places):
    return np.stack([golden.initial(SQUARE, j) for j in places])


def test_golden_runs_of_several_prompts():
    """The first prompt is empty."""
    given = {"num_inference_steps": 4, "latents": initial(0, 1, 2)}
    found = generate(PROMPTS, output_type="latent", **given, **SMALL)
    assert found.dtype == np.float32 and found.shape == (3, 16, 12, 12)
    expected = np.concatenate([golden_latents("g0", f"p{j}") for j in range(3)])
    np.testing.assert_allclose(found, expected, atol=ATOL_LATENTS)
    images = generate(PROMPTS, **given, **SMALL)
    floats = generate(PROMPTS, output_type="np", **given, **SMALL)
    assert floats.dtype == np.float32 and floats.shape == (3, 96, 96, 3)
    for j, image, values in zip(range(3), images, floats, strict=True):
        assert isinstance(image, Image.Image) and image.mode == "RGB"
        pixels = golden.arrays()[f"96x96/g0/p{j}/uint8"][0]
        assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1
        assert np.abs(255 * values - pixels).max() <= 1.01


def test_golden_runs_with_guidance_and_its_limits():
    given = {"num_inference_steps": 4, "latents": initial(2), "negative_prompt": golden.NEGATIVE}
    found = generate(
        PROMPTS[2], guidance_scale=2.5, output_type="latent", **given, **SMALL
    )  # a single prompt has a list, too
    np.testing.assert_allclose(found, golden_latents("g2.5", "p2"), atol=ATOL_LATENTS)


def test_empty_prompts_among_others_are_as_if_alone():
    prompts = ["", PROMPTS[2], " ", "\n\n", PROMPTS[1]]
    found = generate(prompts, seed=3, output_type="latent", **QUICK)
    for place, latents in enumerate(found):
        (alone,) = generate(prompts[place], seed=3 + place, output_type="latent", **QUICK)
        np.testing.assert_allclose(latents, alone, atol=5e-5)


def test_an_empty_prompt_against_an_empty_negative_prompt_is_unguided():
    """prediction + scale (prediction - prediction)"""
    for text in ("", " "):
        plain = generate(text, seed=3, output_type="latent", **QUICK)
        guided = generate(
            text, negative_prompt=text, guidance_scale=4.0, seed=3, output_type="latent", **QUICK
        )
        np.testing.assert_allclose(guided, plain, atol=2e-4)


def test_one_value_or_one_for_each():
    images = generate(
        ["a cat", "a dog"], height=[96, 64], width=[96, 128], num_inference_steps=[1, 2],
        use_tqdm=False,
    )  # fmt: skip
    assert [image.size for image in images] == [(96, 96), (128, 64)]
    arrays = generate(
        ["a cat", "a dog"], height=[96, 64], width=[96, 128], num_inference_steps=1,
        output_type="latent", use_tqdm=False,
    )  # fmt: skip
    assert [array.shape for array in arrays] == [(16, 12, 12), (16, 8, 16)]


def test_seeds_make_images_again():
    three = generate(
        "a cat", num_images_per_prompt=np.int64(3), seed=7, output_type="latent", **QUICK
    )
    again = generate(["a cat"] * 3, seed=[7, 8, 9], output_type="latent", **QUICK)
    np.testing.assert_allclose(three, again, atol=5e-5)  # launches of other sizes round differently
    assert np.abs(three[0] - three[1]).max() > 0.1
    one = generate("a cat", seed=8, output_type="latent", **QUICK)
    np.testing.assert_allclose(one[0], three[1], atol=5e-5)
    np.testing.assert_array_equal(
        one, generate("a cat", seed=8, output_type="latent", **QUICK)
    )  # alone again: the same bits


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("height", {"height": 90}),
        ("width", {"width": 96.5}),
        ("width", {"width": 1024}),
        ("num_inference_steps", {"num_inference_steps": 0}),
        ("guidance_scale", {"guidance_scale": "high"}),
        ("true_cfg_scale", {"true_cfg_scale": 4.0}),
        ("negative_prompt", {"negative_prompt": "blurry"}),
        ("cfg_truncation", {"cfg_truncation": 0.5}),
        ("cfg_normalization", {"cfg_normalization": True}),
        ("max_sequence_length", {"max_sequence_length": 513}),
        ("seed", {"seed": -2}),
        ("seed", {"seed": [1, 2]}),
        ("num_inference_steps", {"num_inference_steps": [1, 2]}),
        ("latents", {"latents": np.zeros((1, 16, 8, 8), np.float32)}),
        ("latents", {"latents": np.zeros((2, 16, 16, 16), np.float32)}),
        ("latents", {"latents": "noise"}),
        ("latents", {"latents": 1.0}),
        ("latents", {"latents": [None, None]}),
        ("latents", {"latents": ["noise"]}),
        ("latents", {"latents": [[1.0], [1.0, 2.0]]}),
        ("output_type", {"output_type": "pt"}),
        ("num_images_per_prompt", {"num_images_per_prompt": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_options_are_named(param, options):
    with pytest.raises(errors.RequestError) as caught:
        generate("a cat", **options)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_latents_may_be_given_for_some_images_and_sizes():
    prompts, sizes = ["a cat", "a dog", "a fox"], {"height": [96, 96, 64], "width": [96, 96, 128]}
    random = np.random.default_rng(0)
    wide = random.standard_normal((16, 8, 16)).astype(np.float32)
    square = initial(1)[0]
    options = {**QUICK, "seed": [5, 6, 7], "output_type": "latent"}
    found = generate(prompts, latents=[square, None, jnp.asarray(wide)], **options | sizes)
    for place, (prompt, given) in enumerate(zip(prompts, (square, None, wide), strict=True)):
        side = {name: values[place] for name, values in sizes.items()}
        given = None if given is None else given[None]
        (alone,) = generate(prompt, latents=given, **options | side | {"seed": 5 + place})
        np.testing.assert_allclose(found[place], alone, atol=1e-4)


def test_what_is_cut_off_of_prompts_is_told(caplog):
    words = {"negative_prompt": "a very long prompt about cats", "guidance_scale": 1.0}
    (whole,) = generate("a cat", **QUICK, **words)
    assert whole.info["truncated_tokens"] == 0 and "max_sequence_length" not in caplog.text
    (cut,) = generate("a cat", **QUICK, **words, max_sequence_length=8)
    (longer,) = generate("a cat", **QUICK, **words, max_sequence_length=9)
    assert cut.info["truncated_tokens"] > longer.info["truncated_tokens"] > 0
    assert f"up to {cut.info['truncated_tokens']} tokens of prompt and" in caplog.text
    # What both lose is counted: the same text twice, and each alone.
    (alone,) = generate("a cat", **QUICK, max_sequence_length=8)
    (both,) = generate(words["negative_prompt"], **QUICK, **words, max_sequence_length=8)
    of_negative = cut.info["truncated_tokens"] - alone.info["truncated_tokens"]
    assert both.info["truncated_tokens"] == 2 * of_negative > 0


def test_a_bar_tells_how_many_images_are_done(capsys):
    shown = {name: value for name, value in QUICK.items() if name != "use_tqdm"}
    generate(["a cat", "a dog"], **shown)
    assert "2/2" in capsys.readouterr().err
    generate(["a cat", "a dog"], **shown, use_tqdm=False)
    assert "2/2" not in capsys.readouterr().err


def test_latents_may_be_bfloat16():
    given = jnp.asarray(initial(1), jnp.bfloat16)
    found = generate("a cat", latents=given, output_type="latent", **QUICK)
    same = generate("a cat", latents=np.float32(given), output_type="latent", **QUICK)
    np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("prompts", [None, [], 5, ["a cat", None], {"prompt": "a cat"}])
def test_wrong_prompts_are_named(prompts):
    with pytest.raises(errors.RequestError) as caught:
        generate(prompts, **QUICK)
    assert caught.value.param in ("prompt", "prompts")


@pytest.mark.parametrize("name", sorted(config.TEXT_OPTIONS))
def test_options_of_models_that_write_text_are_refused(name):
    values = {
        "chat_template": "x",
        "dllm_algorithm": "LowConfidence",
        "dllm_algorithm_config": {},
        "escape_special_tokens": False,
        "schedule_policy": "lpm",
        "tokenizer_path": "x",
    }
    is_switch = name.startswith(("disable", "skip"))
    with pytest.raises(errors.ConfigError, match=f"{name}=.* which makes images"):
        jdllm.ImageEngine(model_path=golden.PIPELINE, **{name: values.get(name, is_switch or 64)})


def test_float16_is_refused_by_name_with_the_reason_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(folder.PipelineFolder, "load", None)  # no weights
    with pytest.raises(errors.ConfigError, match=r"dtype=float16 .*65504; use bfloat16 or float32"):
        jdllm.ImageEngine(model_path=golden.PIPELINE, dtype="float16")


def test_the_engines_name_each_other():
    with pytest.raises(errors.ConfigError, match=r"jdllm\.ImageEngine"):
        jdllm.Engine(model_path=golden.PIPELINE)
    with pytest.raises(errors.ConfigError, match=r"jdllm\.Engine"):
        jdllm.ImageEngine(model_path="jdllm-nano")
    with pytest.raises(errors.ConfigError, match="batching_max_size=4"):
        jdllm.Engine(batching_max_size=4)


@pytest.mark.campaign
def test_dummies_need_configs_alone(tmp_path):
    for path in golden.PIPELINE.rglob("*config.json"):
        if path.parent.name != "tokenizer":
            (tmp_path / path.parent.name).mkdir()
            shutil.copy(path, tmp_path / path.parent.name)
    shutil.copy(golden.PIPELINE / "model_index.json", tmp_path)
    options = image_engine.OPTIONS | {"model_path": tmp_path, "load_format": "dummy"}
    with jdllm.ImageEngine(**options, batching_config={"rules": [RULE]}) as engine:
        assert engine.model_name == "golden" and engine.images_per_step == 1
        (image,) = engine.generate("a cat", seed=1, **QUICK)
    assert image.size == (96, 96)


def test_a_bundled_image_model_is_found_by_its_name_and_is_the_default(monkeypatch):
    monkeypatch.setattr(source, "bundled_model", lambda name="jdllm-nano": golden.GOLDENS / name)
    monkeypatch.setattr(source, "BUNDLED_IMAGE_MODELS", ("pipeline",))
    for name in (None, "pipeline"):
        assert image_options.find(config.EngineConfig(model_path=name)) == golden.PIPELINE


def test_a_path_in_place_of_a_config_is_told_what_to_write():
    with pytest.raises(TypeError, match="got 'somewhere'; .* model_path="):
        jdllm.ImageEngine("somewhere")  # pyright: ignore[reportArgumentType]
