"""Engines for golden pipelines, which all test files of a process share."""

from __future__ import annotations

from support import golden_flux, golden_qwen_image
from support import golden_images as golden
from support.once import once

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


@once
def shared() -> jdllm.ImageEngine:
    return jdllm.ImageEngine(**OPTIONS)


@once
def qwen_image() -> jdllm.ImageEngine:
    """Returns an engine for the golden Qwen-Image, which all test files share, too."""
    path = str(golden_qwen_image.pipeline_path())
    return jdllm.ImageEngine(**OPTIONS | {"model_path": path, "warmup_resolutions": "80x80"})


@once
def flux() -> jdllm.ImageEngine:
    """Returns an engine for the golden FLUX.1-dev, which all test files share, too."""
    return jdllm.ImageEngine(**OPTIONS | {"model_path": str(golden_flux.folder())})
