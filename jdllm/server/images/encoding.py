"""Pictures as files: PNG, JPEG or WebP, with text metadata in PNGs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from jdllm.server.images import png

if TYPE_CHECKING:
    from jdllm.engine.images import requests

MEDIA_TYPES: Mapping[requests.OutputFormat, str] = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}
BEST_COMPRESSION = 100
DEFAULT_COMPRESSION = BEST_COMPRESSION  # OpenAI's
# From here on a JPEG keeps the colour of every pixel (4:4:4), below of every second one in rows and
# columns (4:2:0): by then quantisation costs edges between saturated colours less than that does.
ALL_COLOURS_FROM = 90
# How hard to compress without loss. A picture of 1024x1024 takes 0.4 s of CPU, with the 80 of
# Pillow 0.7 s, and its file is at most 1 % larger.
_LOSSLESS_EFFORT = 30


def encode(
    image: UInt8[np.ndarray, "H W 3"],
    output_format: requests.OutputFormat,
    compression: int,
    metadata: Mapping[str, str],
) -> bytes:
    """Returns `image` as a file.

    `compression` is the encoder's quality for JPEG and WebP, 0 to 100, as in OpenAI's
    `output_compression`: a higher value makes a better file, mostly a larger one. A WebP of 100 is
    lossless.
    `metadata` becomes text chunks of a PNG (UTF-8), and must be empty for the others.
    """
    if output_format == "png":
        readable = {key: _without_nul(value) for key, value in metadata.items()}
        return png.encode(image, readable)
    file = io.BytesIO()
    picture = Image.fromarray(image)
    match output_format:
        case "jpeg":
            sampling = "4:4:4" if compression >= ALL_COLOURS_FROM else "4:2:0"
            picture.save(file, "JPEG", quality=max(compression, 1), subsampling=sampling)
        case "webp" if compression == BEST_COMPRESSION:
            picture.save(file, "WEBP", lossless=True, quality=_LOSSLESS_EFFORT)
        case "webp":
            picture.save(file, "WEBP", quality=compression)
    return file.getvalue()


def _without_nul(text: str) -> str:
    """Returns a text as a PNG may hold it."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def base64_text(content: bytes) -> str:
    """Returns a file as base64, as JSON carries it."""
    return base64.b64encode(content).decode("ascii")
