"""How far JPEGs and WebPs, decoded by Pillow, are from the pixels: at the best quality, not at all.

The pictures are those that lose most where colours have half the resolution: small fields of
saturated colours.
"""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin
from support import edge, fake_images

from jdllm.server.images import encoding

# The largest error of a value at a quality of JPEG with all colours: what 8x8 blocks of these
# fields and of noise have, and half as much again. With half of the colours it is above 200.
JPEG_ERRORS = {100: 6, 95: 33, 90: 60}
WRAPS = 200  # a seed of the fake pipeline with an edge from 255 to 0 inside of its pictures


def fields(height: int, width: int, sides: tuple[int, int]) -> np.ndarray:
    """Returns fields of the eight corners of the RGB cube, `sides` in size, in random order."""
    rows, columns = (
        -(-length // side) for length, side in zip((height, width), sides, strict=True)
    )
    corners = np.random.default_rng(0).integers(0, 2, (rows, columns, 3), dtype=np.uint8) * 255
    whole = corners.repeat(sides[0], axis=0).repeat(sides[1], axis=1)
    return np.ascontiguousarray(whole[:height, :width])


PICTURES = {
    "fields": fields(64, 96, (7, 5)),
    "pixels": fields(33, 47, (1, 1)),
    "lines": fields(64, 64, (64, 1)),
    "noise": np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8),
    "one pixel": np.array([[[255, 0, 0]]], np.uint8),
}


def decoded(content: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return picture


def error_of(picture: Image.Image, pixels: np.ndarray) -> int:
    assert picture.mode == "RGB"
    return int(np.abs(np.asarray(picture, int) - pixels).max())


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("quality", JPEG_ERRORS)
def test_a_jpeg_of_high_quality_keeps_all_colours(name, quality):
    picture = decoded(encoding.encode(PICTURES[name], "jpeg", quality, {}))
    assert picture.format == "JPEG" and JpegImagePlugin.get_sampling(picture) == 0
    assert error_of(picture, PICTURES[name]) <= JPEG_ERRORS[quality]


def test_a_jpeg_of_lower_quality_has_half_of_the_colours():
    for quality in (0, 50, 89):
        picture = decoded(encoding.encode(PICTURES["fields"], "jpeg", quality, {}))
        assert JpegImagePlugin.get_sampling(picture) == 2, quality


@pytest.mark.parametrize("name", PICTURES)
def test_a_webp_of_the_best_quality_loses_nothing(name):
    picture = decoded(encoding.encode(PICTURES[name], "webp", 100, {}))
    assert picture.format == "WEBP" and error_of(picture, PICTURES[name]) == 0
    lossy = decoded(encoding.encode(PICTURES[name], "webp", 99, {}))
    assert name == "one pixel" or error_of(lossy, PICTURES[name]) > 0


@pytest.mark.parametrize(("name", "most"), [("jpeg", JPEG_ERRORS[100]), ("webp", 0)])
def test_pictures_and_previews_have_the_best_quality_by_default(name, most):
    body = {"prompt": "a cat", "seed": WRAPS, "output_format": name}
    body |= {"stream": True, "partial_images": 1}
    server = edge.make_state(fake_images.FakeImageEngine())
    events = edge.call(server, "/v1/images/generations", body).text.split("\n\n")[:2]
    for step, event in zip((1, 4), events, strict=True):
        content = json.loads(event.partition("data: ")[2])["b64_json"]
        pixels = fake_images.painted(64, 96, WRAPS, step)
        assert error_of(decoded(base64.b64decode(content)), pixels) <= most
