"""Every wrong field of a request for images is a 400 that names it, and nothing is made."""

from __future__ import annotations

import json

import pytest
from support import edge, fake_images
from support.fuzz import bodies

PATH = "/v1/images/generations"
SIZES = (*bodies.WRONG_INTEGER, "-16", "0", "65", "272")
SCALES = (*bodies.WRONG_NUMBER, "100.5")
# Wrong values of each field, as JSON.
FIELDS: dict[str, tuple[str, ...]] = {
    "prompt": (*bodies.WRONG_TEXT, "null", '["a cat"]', json.dumps("x" * 32_001)),
    "model": bodies.WRONG_TEXT,
    "n": (*bodies.WRONG_INTEGER, "0", "11", "-1"),
    "size": (*bodies.WRONG_TEXT, '""', '"96"', '"96 x 64"', '"100x64"', '"96x0"', '"256x256"'),
    "width": SIZES,
    "height": SIZES,
    "num_inference_steps": (*bodies.WRONG_INTEGER, "0", "51", "-1"),
    "guidance_scale": SCALES,
    "true_cfg_scale": (*SCALES, "2"),
    "cfg_truncation": (*SCALES, "0.5"),
    "cfg_normalization": ('"0.5"', "[]", "{}", '""', "-1", "true", "1", "1e300"),
    # The fake pipeline has no step cache.
    "residual_diff_threshold": (*bodies.WRONG_NUMBER, "-0.1", "1.5", "0.5"),
    "negative_prompt": (*bodies.WRONG_TEXT, '"fog"'),
    "max_sequence_length": (*bodies.WRONG_INTEGER, "0", "65"),
    "seed": ('"5"', "1.5", "true", "false", "[]", "{}", '""', "-2", "9" * 25, "[1, 2]", "[true]"),
    "response_format": (*bodies.WRONG_TEXT, '"file"', '"URL"'),
    "output_format": (*bodies.WRONG_TEXT, '"gif"', '"PNG"', '"svg"'),
    "output_compression": (*bodies.WRONG_INTEGER, "-1", "101", "50"),
    "embed_image_metadata": bodies.WRONG_FLAG,
    "stream": bodies.WRONG_FLAG,
    "partial_images": (*bodies.WRONG_INTEGER, "-1", "4", "1"),
    "rid": bodies.WRONG_RID,
    "priority": ('"5"', "1.5", "true", "1"),
    "user": bodies.WRONG_TEXT,
    "background": ('"transparent"', "5"),
    "quality": ('"high"', '"hd"', '"low"', "5"),
    "moderation": ('"strict"', "5"),
    "style": ('"natural"', "5"),
    "output_quality": ('"high"',),
    "generator_device": ('"cpu"',),
    "enable_teacache": ("true",),
    "flow_shift": ("3.0", "0"),
    "latents": ("[[0.5]]",),
    "prompt_2": ('"a cat"',),
    "svg": ('{"model": "x"}',),
    "frame_count": ("9",),
    "num_inference_step": ("5",),
    "guidance": ("1.5",),
}
# What is empty asks for nothing, and a negative prompt has no other type.
FIELDS = {
    name: [one for one in values if name == "negative_prompt" or one not in bodies.EMPTY]
    for name, values in FIELDS.items()
}
KWARGS = (
    "width",
    "num_inference_steps",
    "guidance_scale",
    "max_sequence_length",
    "negative_prompt",
    "prompt_2",
)


@pytest.fixture
def engine() -> fake_images.FakeImageEngine:
    return fake_images.FakeImageEngine()


@pytest.mark.parametrize("name", FIELDS)
def test_every_wrong_value_is_refused_by_name(engine, name):
    server = edge.make_state(engine)
    for value in FIELDS[name]:
        raw = bodies.dumps({"prompt": "a cat"} | {name: bodies.Raw(value)})
        response = send(server, raw)
        assert response.status_code == 400, f"{name}={value}: {response.text}"
        assert edge.error_of(response)["param"] == name, f"{name}={value}: {response.text}"
    assert engine.seen == []


@pytest.mark.parametrize("name", KWARGS)
def test_the_same_inside_of_diffusers_kwargs(engine, name):
    server = edge.make_state(engine)
    for value in FIELDS[name]:
        inner = {name: bodies.Raw(value)}
        response = send(server, bodies.dumps({"prompt": "a cat", "diffusers_kwargs": inner}))
        assert response.status_code == 400, f"{name}={value}"
        assert edge.error_of(response)["param"] == f"diffusers_kwargs.{name}", response.text
    assert engine.seen == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "96x64", "width": 64}, "size"),
        ({"width": 64, "diffusers_kwargs": {"width": 96}}, "diffusers_kwargs.width"),
        ({"diffusers_kwargs": {"steps": 4}}, "diffusers_kwargs.steps"),
        ({"diffusers_kwargs": {"latents": [[1]]}}, "diffusers_kwargs.latents"),
        ({"diffusers_kwargs": 5}, "diffusers_kwargs"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"output_format": "png", "output_compression": 80}, "output_compression"),
        ({"output_format": "jpeg", "embed_image_metadata": True}, "embed_image_metadata"),
        ({"n": 2, "seed": [1]}, "seed"),
        ({"n": 2, "seed": [1, 2, 3]}, "seed"),
        ({"prompts": ["a cat"]}, "prompts"),
    ],
)
def test_fields_that_do_not_go_together(engine, fields, param):
    response = edge.call(edge.make_state(engine), PATH, {"prompt": "a cat"} | fields)
    assert response.status_code == 400, response.text
    assert edge.error_of(response)["param"] == param
    assert engine.seen == []


def test_a_body_without_a_prompt_and_a_body_that_is_none(engine):
    server = edge.make_state(engine)
    assert edge.error_of(edge.call(server, PATH, {}))["param"] == "prompt"
    for raw in (b"", b"[]", b'"x"', b"{", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'):
        assert send(server, raw).status_code == 400
    plain = edge.call(
        server, PATH, raw=b"{}", method="POST", headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 400


NEUTRAL = {
    "n": None, "size": "auto", "style": "vivid", "quality": "auto", "background": "auto",
    "moderation": "low", "user": "somebody", "safety_identifier": "x", "output_quality": "default",
    "generator_device": "cuda", "enable_teacache": False, "negative_prompt": "",
    "residual_diff_threshold": 0,
    "cfg_truncation": 1.0, "cfg_normalization": False, "true_cfg_scale": 1.0,
    "output_compression": 100, "partial_images": 0, "stream": False, "diffusers_kwargs": {},
    "upscaling_scale": 4, "latents": None, "extra_headers": {}, "priority": 0, "svg": None,
}  # fmt: skip


def test_what_asks_for_nothing_passes(engine):
    server = edge.make_state(engine)
    for name, value in NEUTRAL.items():
        response = edge.call(server, PATH, {"prompt": "a cat", name: value})
        assert response.status_code == 200, f"{name}={value}: {response.text}"
    assert edge.call(server, PATH, {"prompt": "a cat"} | NEUTRAL).status_code == 200


def test_another_model_is_refused_where_names_are_strict(engine):
    strict = edge.make_state(engine, strict_model_name=True)
    response = edge.call(strict, PATH, {"prompt": "a cat", "model": "another"})
    assert (response.status_code, edge.error_of(response)["code"]) == (404, "model_not_found")
    for name in ("fake-image", None):
        assert edge.call(strict, PATH, {"prompt": "a cat", "model": name}).status_code == 200


def test_keys_and_limits_of_bodies_hold_here_too(engine):
    server = edge.make_state(engine, api_key="secret", max_body_bytes=1000)
    key = {"authorization": "Bearer secret"}
    assert edge.call(server, PATH, {"prompt": "a cat"}).status_code == 401
    body = {"prompt": "a cat", "response_format": "url"}
    response = edge.call(server, PATH, body, headers=key | {"x-request-id": "mine"})
    assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
    path = response.json()["data"][0]["url"].removeprefix("http://test")
    assert edge.call(server, path).status_code == 401
    assert edge.call(server, path, headers=key).status_code == 200
    large = edge.call(server, PATH, {"prompt": "x" * 2000}, headers=key)
    assert large.status_code == 413


def send(server, raw: bytes):
    headers = {"content-type": "application/json"}
    return edge.call(server, PATH, raw=raw, method="POST", headers=headers)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/images/edits", "images as inputs"),
        ("/v1/images/variations", "images as inputs"),
        ("/v1/videos", "videos"),
    ],
)
def test_routes_that_are_not_built_say_so(engine, path, named):
    server, form = edge.make_state(engine), {"content-type": "multipart/form-data; boundary=x"}
    for raw, headers in ((b"{}", {}), (b"--x\r\n", form), (b"", {})):
        response = edge.call(server, path, raw=raw, method="POST", headers=headers)
        assert response.status_code == 400, response.text
        error = edge.error_of(response)
        assert error["code"] == "not_built"
        assert path in error["message"] and named in error["message"]
    assert engine.seen == []
    assert edge.call(edge.make_state(engine, api_key="secret"), path, {}).status_code == 401
    assert "writes text" in edge.error_of(edge.call(edge.make_state(), path, {}))["message"]
