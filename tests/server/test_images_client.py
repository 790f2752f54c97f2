"""The openai package, unmodified, against a real socket: images, events, URLs, leaving clients."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pydantic
import pytest
from openai import types
from PIL import Image
from support import edge, fake_images, socket_server, waiting

H, W, STEPS = 64, 96, 4  # the fake pipeline's defaults
STEP_S = 0.02
SLOW = {"num_inference_steps": 50}  # a second


@pytest.fixture(scope="module")
def engine() -> fake_images.FakeImageEngine:
    return fake_images.FakeImageEngine(step_s=STEP_S, max_queued=20)


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    with socket_server.serving(edge.make_state(engine)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def strictly(model: type[pydantic.BaseModel], found: pydantic.BaseModel) -> None:
    """Checks the fields of the package's own types, which it does not check itself."""
    model.model_validate(json.loads(found.model_dump_json()), strict=True)


def test_generate(client):
    answer = client.images.generate(
        prompt="a cat", model="any", n=2, size="32x48", extra_body={"seed": [4, 9]}
    )
    strictly(types.ImagesResponse, answer)
    assert (answer.size, answer.output_format) == ("32x48", "png")
    for image, seed in zip(answer.data, (4, 9), strict=True):
        found = pixels(base64.b64decode(image.b64_json))
        assert np.array_equal(found, fake_images.painted(48, 32, seed, STEPS))
        assert (image.url, image.revised_prompt, image.seed) == (None, None, seed)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 12)


def test_a_url_can_be_fetched(client):
    answer = client.images.generate(
        prompt="a cat", response_format="url", output_format="webp", extra_body={"seed": 1}
    )
    strictly(types.ImagesResponse, answer)
    response = httpx.get(answer.data[0].url)
    assert response.headers["content-type"] == "image/webp"
    assert pixels(response.content).shape == (H, W, 3)


def test_generate_with_stream(client):
    stream = client.images.generate(
        prompt="a cat", stream=True, partial_images=3, extra_body={"seed": 7}
    )
    *partial, last = list(stream)
    for place, event in enumerate(partial):
        strictly(types.ImageGenPartialImageEvent, event)
        assert event.partial_image_index == place
        found = pixels(base64.b64decode(event.b64_json))
        assert np.array_equal(found, fake_images.painted(H, W, 7, place + 1))
    assert len(partial) == 3
    strictly(types.ImageGenCompletedEvent, last)
    found = pixels(base64.b64decode(last.b64_json))
    assert np.array_equal(found, fake_images.painted(H, W, 7, STEPS))


def test_refusals_and_faults(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a cat", size="100x100")
    assert (caught.value.param, caught.value.type) == ("size", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="/v1/images/edits is not built"):
        client.images.edit(image=("a.png", b"picture", "image/png"), prompt="a cat")
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        client.images.generate(prompt=fake_images.FAULT)
    with pytest.raises(openai.APIError, match="not numbers"):
        list(client.images.generate(prompt=fake_images.FAULT, stream=True, partial_images=1))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.param == "model"


def test_the_model_says_that_it_makes_images(client):
    (model,) = client.models.list().data
    assert model.model_extra["architecture"]["output_modalities"] == ["image"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_images(engine, url, stream):
    body = {"prompt": "a cat", "n": 3, "stream": stream, "rid": f"leaves {stream}"} | SLOW
    before = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/images/generations", json=body, timeout=0.3)
    waiting.wait_until(lambda: not engine.open_requests)
    assert time.monotonic() - before < 50 * STEP_S  # long before the images would be done
    assert [one.num_inference_steps for one in engine.seen[-3:]] == [50] * 3


def test_others_are_served_while_images_are_made(engine, client, url):
    body = {"prompt": "a cat", "stream": True, "partial_images": 1} | SLOW
    with httpx.stream("POST", f"{url}/images/generations", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("event: ")
        answer = client.images.generate(prompt="a dog", extra_body={"seed": 2})
        found = pixels(base64.b64decode(answer.data[0].b64_json))
        assert np.array_equal(found, fake_images.painted(H, W, 2, STEPS))
        assert len(engine.open_requests) == 1  # the slow one has not ended yet
    waiting.wait_until(lambda: not engine.open_requests)


@pytest.mark.parametrize("host", ["x y", "[::1", "a/b", "host:99999999", '"', "é"])
def test_no_host_of_a_request_breaks_a_url(url, host):
    port = int(url.rpartition(":")[2].removesuffix("/v1"))
    body = b'{"prompt": "a cat", "response_format": "url"}'
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket_server.connect(port) as connection:
        connection.sendall(head.encode() + body)
        answer = socket_server.read_all(connection)
    status = int(answer.split()[1])
    assert status in (200, 400)
    if status == 200:
        entry = json.loads(answer.partition(b"\r\n\r\n")[2])["data"][0]
        assert "/v1/images/img-" in entry["url"]
