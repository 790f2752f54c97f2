"""Requests for images: every default is filled in, and what cannot be made is named."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from support import fake_images, golden_pipelines

from jdllm import errors
from jdllm.engine.images import checks, choices, requests

FACTS, FLUX = fake_images.FACTS, fake_images.FLUX_FACTS
# As Qwen-Image: a scale above 1 by default, which counts only beside a negative prompt.
QWEN = dataclasses.replace(FLUX, default_guidance_scale=None, default_true_cfg_scale=4.0)
BARE = dataclasses.replace(
    FACTS, default_guidance_scale=None, cfg_switch=None, has_cfg_limits=False
)
CHANNELS, ROWS, COLUMNS = 16, 8, 12  # of latents at the default size: 64x96 in patches of 16


def asked(**options) -> requests.ImageRequest:
    return requests.ImageRequest(prompt=options.pop("prompt", "a cat"), **options)


def latents(*shape: int, value: float = 0.0) -> np.ndarray:
    return np.full(shape, value, np.float64)


def test_every_default_is_filled_in():
    found = checks.resolve(asked(seed=5), FACTS)
    assert found == requests.ImageRequest(
        prompt="a cat", height=64, width=96, num_inference_steps=4, guidance_scale=0.0,
        cfg_truncation=1.0, cfg_normalization=0.0, max_sequence_length=32, seed=5,
        partial_images=0,
    )  # fmt: skip
    found = checks.resolve(asked(seed=5), FLUX)
    assert (found.guidance_scale, found.true_cfg_scale) == (3.5, None)
    assert (found.cfg_truncation, found.cfg_normalization) == (None, None)


@pytest.mark.parametrize("negative", [None, ""])
@pytest.mark.parametrize(
    "facts", [FACTS, FLUX, QWEN, BARE], ids=["z_image", "flux", "qwen_image", "bare"]
)
def test_a_resolved_request_comes_back_as_it_is(facts, negative):
    given = latents(*facts.latents_shape(64, 96), value=0.5)
    once = checks.resolve(asked(latents=given, negative_prompt=negative), facts)
    again = checks.resolve(once, facts)
    assert again == once
    assert np.array_equal(again.latents, given) and again.latents.dtype == np.float32


@pytest.mark.parametrize("prompt", ["", " ", " \n\t"])
def test_an_empty_prompt_is_one_as_it_is(prompt):
    for facts in (FACTS, FLUX, QWEN, BARE):
        assert checks.resolve(asked(prompt=prompt), facts).prompt == prompt


@golden_pipelines.of_each
def test_an_empty_prompt_is_encoded_as_an_empty_negative_prompt(golden):
    """The latter is held to diffusers by golden runs, with and without spaces."""
    folder, pipeline = golden.folder(), golden.pipeline().pipeline
    facts = dataclasses.replace(QWEN, max_sequence_length=64)
    inputs = choices.ImageInputs(pipeline.prompt_tokenizer(folder.tokenizers), facts)
    for text in ("", " ", "  \n"):
        (choice,) = inputs.choices([asked(prompt=text, negative_prompt=text)], "a", 0).values()
        request = choice.request
        assert request.image is not None and request.image.is_guided
        assert request.prompt_ids == list(request.image.negative_ids)
        assert len(request.prompt_ids) > pipeline.prefix_tokens


def test_guidance_of_z_image_begins_above_zero():
    off = checks.resolve(asked(guidance_scale=0, negative_prompt=""), FACTS)
    assert not requests.is_guided(off, FACTS) and off.negative_prompt is None
    on = checks.resolve(asked(guidance_scale=0.5), FACTS)
    assert requests.is_guided(on, FACTS) and on.negative_prompt == ""
    on = checks.resolve(
        asked(guidance_scale=2, negative_prompt="fog", cfg_truncation=7, cfg_normalization=True),
        FACTS,
    )
    assert (on.negative_prompt, on.cfg_truncation, on.cfg_normalization) == ("fog", 1.0, 1.0)


def test_guidance_of_flux_needs_a_scale_and_a_negative_prompt():
    found = checks.resolve(asked(negative_prompt="", true_cfg_scale=2), FLUX)
    assert requests.is_guided(found, FLUX) and found.negative_prompt == ""
    found = checks.resolve(asked(true_cfg_scale=1), FLUX)
    assert not requests.is_guided(found, FLUX)


def test_guidance_of_qwen_image_needs_a_negative_prompt_alone():
    off = checks.resolve(asked(), QWEN)
    assert not requests.is_guided(off, QWEN) and off.true_cfg_scale is None
    on = checks.resolve(asked(negative_prompt=" "), QWEN)
    assert requests.is_guided(on, QWEN)
    assert (on.negative_prompt, on.true_cfg_scale) == (" ", 4.0)


def test_an_option_that_does_not_exist_may_ask_for_nothing():
    neutral = asked(guidance_scale=0, true_cfg_scale=1, cfg_truncation=1, cfg_normalization=False)
    found = checks.resolve(neutral, BARE)
    assert (found.guidance_scale, found.true_cfg_scale, found.cfg_truncation) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "facts", "param"),
    [
        ({"prompt": None}, FACTS, "prompt"),
        ({"prompt": 5}, FACTS, "prompt"),
        ({"prompt": "x" * 32_001}, FACTS, "prompt"),
        ({"height": 65}, FACTS, "height"),
        ({"height": 0}, FACTS, "height"),
        ({"height": 272}, FACTS, "height"),
        ({"width": 64.5}, FACTS, "width"),
        ({"width": True}, FACTS, "width"),
        ({"height": 256, "width": 256}, FACTS, "height"),
        ({"num_inference_steps": 0}, FACTS, "num_inference_steps"),
        ({"num_inference_steps": 51}, FACTS, "num_inference_steps"),
        ({"guidance_scale": -0.1}, FACTS, "guidance_scale"),
        ({"guidance_scale": float("nan")}, FACTS, "guidance_scale"),
        ({"guidance_scale": 10**400}, FACTS, "guidance_scale"),
        ({"guidance_scale": 2.0}, BARE, "guidance_scale"),
        ({"true_cfg_scale": 2.0}, FACTS, "true_cfg_scale"),
        ({"true_cfg_scale": 2.0}, FLUX, "true_cfg_scale"),
        ({"negative_prompt": "fog"}, FACTS, "negative_prompt"),
        ({"negative_prompt": "fog"}, FLUX, "negative_prompt"),
        ({"negative_prompt": "fog"}, BARE, "negative_prompt"),
        ({"negative_prompt": 5, "guidance_scale": 1}, FACTS, "negative_prompt"),
        ({"cfg_truncation": 0.5}, FACTS, "cfg_truncation"),
        ({"cfg_truncation": -1, "guidance_scale": 1}, FACTS, "cfg_truncation"),
        ({"cfg_normalization": True}, FACTS, "cfg_normalization"),
        ({"cfg_normalization": "", "guidance_scale": 1}, FACTS, "cfg_normalization"),
        ({"negative_prompt": "", "true_cfg_scale": 2, "cfg_normalization": 1}, FLUX,
         "cfg_normalization"),
        ({"max_sequence_length": 65}, FACTS, "max_sequence_length"),
        ({"seed": -2}, FACTS, "seed"),
        ({"seed": 2**63}, FACTS, "seed"),
        ({"seed": 1.5}, FACTS, "seed"),
        ({"partial_images": 4}, FACTS, "partial_images"),
        ({"latents": [[0.0]]}, FACTS, "latents"),
        ({"latents": np.zeros((CHANNELS, ROWS, COLUMNS), np.int32)}, FACTS, "latents"),
        ({"latents": latents(CHANNELS, COLUMNS, ROWS)}, FACTS, "latents"),
        ({"latents": latents(1, CHANNELS, ROWS, COLUMNS)}, FACTS, "latents"),
        ({"latents": latents(CHANNELS, ROWS, COLUMNS, value=np.nan)}, FACTS, "latents"),
        ({"latents": latents(CHANNELS, ROWS, COLUMNS)}, FLUX, "latents"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_named(options, facts, param):
    with pytest.raises(errors.RequestError) as caught:
        checks.resolve(asked(**options), facts)
    assert caught.value.param == param
    words = str(caught.value)
    # One size is too large for its pixels, and the message is about both sides.
    assert param in words or param == "height"


def test_a_size_that_does_not_divide_is_told_what_would():
    with pytest.raises(errors.RequestError, match="multiple of 16, such as 96 or 112"):
        checks.resolve(asked(width=100), FACTS)


def test_packed_latents_have_a_row_for_each_token():
    assert FACTS.latents_shape(64, 96) == (CHANNELS, ROWS, COLUMNS)
    assert FLUX.latents_shape(64, 96) == (24, 64)  # 4x6 patches of 16 pixels, 4 x 16 values each
    assert FLUX.image_tokens(64, 96) == FACTS.image_tokens(64, 96) == 24


def test_seeds_follow_the_first_or_stand_in_a_list():
    assert checks.seeds(7, 3) == [7, 8, 9]
    assert checks.seeds(2**63 - 1, 2) == [2**63 - 1, 0]
    assert checks.seeds([5, 5, 1], 3) == [5, 5, 1]
    drawn = checks.seeds(None, 50)
    assert len(set(drawn)) > 45 and all(0 <= seed < 2**32 for seed in drawn)


@pytest.mark.parametrize(
    ("seed", "count"), [([1], 2), ([], 1), ([1, 2], 1), ([1, None], 2), ([True], 1), ("5", 1)]
)
def test_wrong_seeds_are_named(seed, count):
    with pytest.raises(errors.RequestError) as caught:
        checks.seeds(seed, count)
    assert caught.value.param == "seed"


def test_sizes_are_width_by_height():
    assert checks.size_of("96x64") == (96, 64)
    assert checks.size_of("auto") is None


@pytest.mark.parametrize(
    "size", ["", "96", "96X64", "96x", "x64", "-96x64", "96x64x3", "9" * 7 + "x5", "٩6x64", 5]
)
def test_wrong_sizes_are_named(size):
    with pytest.raises(errors.RequestError) as caught:
        checks.size_of(size)
    assert caught.value.param == "size"


def test_minus_one_is_a_random_seed_also_in_a_list_and_as_a_float():
    for one in (-1, -1.0):
        drawn = checks.seeds(one, 50)
        assert len(set(drawn)) > 45 and all(0 <= seed < 2**32 for seed in drawn)
    first, *_, last = checks.seeds([5, -1, 7.0], 3)
    assert (first, last, type(last)) == (5, 7, int)
    assert checks.resolve(asked(seed=-1), FACTS).seed >= 0
    assert checks.seeds(7.0, 2) == [7, 8]


def test_whole_numbers_may_be_floats():
    whole = {"height": 64, "width": 96, "num_inference_steps": 3, "max_sequence_length": 9,
             "partial_images": 2, "seed": 4}  # fmt: skip
    floats = checks.resolve(asked(**{name: float(n) for name, n in whole.items()}), FACTS)
    assert floats == checks.resolve(asked(**whole), FACTS)
    assert {type(getattr(floats, name)) for name in whole} == {int}


ADVICE = re.compile(r"give an? (\w+) above (\d)(?: and an? (\w+))?")


@pytest.mark.parametrize("facts", [FACTS, FLUX, QWEN, BARE], ids=lambda facts: facts.family)
@pytest.mark.parametrize(
    "options",
    [
        {"negative_prompt": "fog"},
        {"negative_prompt": "fog", "true_cfg_scale": 1.0},
        {"true_cfg_scale": 3.0},
        {"cfg_truncation": 0.5},
        {"cfg_normalization": True},
    ],
)
def test_who_does_what_an_error_says_gets_an_image(options, facts):
    """Advice is followed once, and leaving the option out is always possible."""
    request = asked(**options)
    try:
        checks.resolve(request, facts)
    except errors.RequestError as error:
        advice, param = ADVICE.search(str(error)), error.param
        assert str(error).startswith(param) and "leave" in str(error)
        if advice is not None:
            switch, least, other = advice.groups()
            changes = {switch: int(least) + 1.0} | ({other: ""} if other else {})
            checks.resolve(dataclasses.replace(request, **changes), facts)
        checks.resolve(dataclasses.replace(request, **{param: None}), facts)


def test_half_a_character_is_no_prompt():
    for name in ("prompt", "negative_prompt"):
        with pytest.raises(errors.RequestError, match="lone surrogate") as caught:
            checks.resolve(asked(**{name: "fog\ud800", "guidance_scale": 2.0}), FACTS)
        assert caught.value.param == name
