"""Qwen-Image behind the HTTP app: a negative prompt and its scale, and what the answer says."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from support import edge, image_engine
from support.golden_qwen_image import PREFIX

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

PATH = "/v1/images/generations"
ASKED = {"prompt": "A red bicycle.", "size": "80x80", "num_inference_steps": 2, "seed": 11}
GUIDED = {"negative_prompt": "Blurry, low quality.", "true_cfg_scale": 2.5}


def made(**fields):
    response = edge.call(edge.make_state(image_engine.qwen_image()), PATH, ASKED | fields)
    assert response.status_code == 200, response.text
    return response.json()


def picture(entry) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(entry["b64_json"])))


def offline(**options) -> np.ndarray:
    (image,) = image_engine.qwen_image().generate(
        ASKED["prompt"], height=80, width=80, num_inference_steps=2, seed=11, use_tqdm=False,
        **options,
    )  # fmt: skip
    return np.asarray(image).astype(int)


def test_a_guided_image_is_that_of_the_offline_interface():
    answer = made(**GUIDED)
    (entry,) = answer["data"]
    found = picture(entry)
    assert np.abs(np.asarray(found) - offline(**GUIDED)).max() <= 1
    assert np.abs(np.asarray(found) - offline()).max() > 1
    assert entry["true_cfg_scale"] == 2.5
    assert found.text["true_cfg_scale"] == "2.5"
    assert found.text["negative_prompt"] == GUIDED["negative_prompt"]
    assert "guidance_scale" not in found.text
    usage = answer["usage"]
    assert usage["input_tokens"] == PREFIX + 10 and usage["output_tokens"] == 25


def test_the_default_scale_needs_a_negative_prompt():
    (entry,) = made()["data"]
    assert np.abs(np.asarray(picture(entry)) - offline()).max() <= 1
    assert "true_cfg_scale" not in entry and "true_cfg_scale" not in picture(entry).text
    (entry,) = made(diffusers_kwargs={"negative_prompt": " "})["data"]
    assert entry["true_cfg_scale"] == 4.0
    assert np.abs(np.asarray(picture(entry)) - offline(negative_prompt=" ")).max() <= 1


def test_what_a_png_holds_makes_the_image_again():
    for fields in ({}, GUIDED):
        (entry,) = made(**fields)["data"]
        text = picture(entry).text
        again = {name: text[name] for name in ("prompt", "negative_prompt") if name in text}
        if "true_cfg_scale" in text:
            again["true_cfg_scale"] = float(text["true_cfg_scale"])
        (other,) = made(**again)["data"]
        assert other["b64_json"] == entry["b64_json"]
