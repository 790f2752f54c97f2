"""Pillow reads what we write: every picture, and every text beside it."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jdllm.server.images import png

MOST_BYTES_OF_RUNS = 2000  # of 64x64 pixels in one colour


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (33, 48), (64, 64), (300, 201)])
@pytest.mark.parametrize("kind", ["noise", "flat", "ramp"])
def test_pictures_come_back(shape, kind):
    pixels = {
        "noise": np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8),
        "flat": np.full((*shape, 3), (255, 0, 3), np.uint8),
        "ramp": (np.arange(np.prod(shape) * 3) * 5 % 256).astype(np.uint8).reshape(*shape, 3),
    }[kind]
    content = png.encode(pixels, {})
    picture = Image.open(io.BytesIO(content))
    picture.verify()  # the checksums
    assert (picture.format, picture.mode) == ("PNG", "RGB")
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)
    if kind == "flat":
        assert len(content) < MOST_BYTES_OF_RUNS


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_bands_end_anywhere(monkeypatch, extra):
    """Each pixel of a line of one byte and 3 * 7 is once the last of a band."""
    pixels = np.random.default_rng(1).integers(0, 256, (22, 7, 3), dtype=np.uint8)
    monkeypatch.setattr(png, "BAND_BYTES", 22 + extra)
    content = png.encode(pixels, {})
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)
    with pytest.raises((OSError, SyntaxError)):  # Pillow sees a wrong sum of the whole
        monkeypatch.setattr(png.zlib, "adler32", lambda content: 1)
        Image.open(io.BytesIO(png.encode(pixels, {}))).load()


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_texts_come_back(text):
    content = png.encode(np.zeros((2, 3, 3), np.uint8), {"prompt": text, "seed": "7"})
    assert Image.open(io.BytesIO(content)).text == {"prompt": text, "seed": "7"}
