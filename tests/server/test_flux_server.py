"""FLUX.1 behind the HTTP app: both scales, cut prompts, and what the answer says of them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from support import edge, image_engine
from support.golden_flux import CLIP_IDS, LENGTH
from support.image_launches import PROMPTS

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

PATH = "/v1/images/generations"
ASKED = {"prompt": "A red bicycle.", "size": "96x96", "num_inference_steps": 2, "seed": 11}
GUIDED = {"negative_prompt": "Blurry, low quality.", "true_cfg_scale": 2.0}


def answered(**fields):
    return edge.call(edge.make_state(image_engine.flux()), PATH, ASKED | fields)


def made(**fields):
    response = answered(**fields)
    assert response.status_code == 200, response.text
    return response.json()


def picture(entry) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(entry["b64_json"])))


def offline(**options) -> np.ndarray:
    (image,) = image_engine.flux().generate(
        ASKED["prompt"], height=96, width=96, num_inference_steps=2, seed=11, use_tqdm=False,
        **options,
    )  # fmt: skip
    return np.asarray(image).astype(int)


def test_an_image_is_that_of_the_offline_interface():
    answer = made()
    (entry,) = answer["data"]
    found = picture(entry)
    assert np.abs(np.asarray(found) - offline()).max() <= 1
    assert found.text["guidance_scale"] == "3.5"
    assert "true_cfg_scale" not in entry and "true_cfg_scale" not in found.text
    usage = answer["usage"]
    # Encoders read pads, too.
    assert usage["input_tokens"] == CLIP_IDS + 512 and usage["output_tokens"] == 36
    assert usage["input_tokens_details"]["truncated_tokens"] == 0


def test_a_guided_image_is_that_of_the_offline_interface():
    (entry,) = made(diffusers_kwargs=GUIDED, guidance_scale=5.0)["data"]
    found = picture(entry)
    assert np.abs(np.asarray(found) - offline(guidance_scale=5.0, **GUIDED)).max() <= 1
    assert np.abs(np.asarray(found) - offline(guidance_scale=5.0)).max() > 1
    assert entry["true_cfg_scale"] == 2.0
    assert found.text["true_cfg_scale"] == "2.0" and found.text["guidance_scale"] == "5.0"
    assert found.text["negative_prompt"] == GUIDED["negative_prompt"]


def test_a_prompt_that_is_too_long_is_cut_and_the_answer_says_so():
    usage = made(prompt=PROMPTS[2], max_sequence_length=LENGTH)["usage"]
    assert usage["input_tokens"] == CLIP_IDS + LENGTH
    # 147 tokens, the end token among them, become 64.
    assert usage["input_tokens_details"]["truncated_tokens"] == 147 - LENGTH


def test_a_negative_prompt_alone_is_refused_with_what_is_missing():
    response = answered(negative_prompt="fog")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "negative_prompt" and "true_cfg_scale above 1" in error["message"]
