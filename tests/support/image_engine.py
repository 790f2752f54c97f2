"""One engine for the golden Z-Image pipeline, which all test files of a process share."""

from __future__ import annotations

import functools

from support import golden_images as golden

import jdllm

OPTIONS = {
    "model_path": str(golden.PIPELINE),
    "served_model_name": "golden",
    "warmup_resolutions": "96x96",
    "max_image_pixels": 128 * 128,  # the default size is 128x128
    "batching_max_size": 2,
    "max_running_requests": 4,
    "max_queued_requests": 8,
}


@functools.cache
def shared() -> jdllm.ImageEngine:
    return jdllm.ImageEngine(**OPTIONS)
