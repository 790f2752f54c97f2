"""All pipelines with whole golden runs: one line for each."""

from __future__ import annotations

import pytest
from support import golden_flux, golden_images, golden_qwen_image

PIPELINES = (golden_images.GOLDEN, golden_flux.GOLDEN, golden_qwen_image.GOLDEN)

of_each = pytest.mark.parametrize("golden", PIPELINES, ids=lambda golden: golden.name)
