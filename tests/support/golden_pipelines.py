"""All pipelines with whole golden runs: one line for each."""

from __future__ import annotations

import pytest
from support import golden_flux, golden_images, golden_qwen_image, marks

PIPELINES = (golden_images.GOLDEN, golden_flux.GOLDEN, golden_qwen_image.GOLDEN)

# `of_few` is for laws of what all pipelines share: the others are in the campaign.
of_each = pytest.mark.parametrize("golden", PIPELINES, ids=lambda golden: golden.name)
of_few = pytest.mark.parametrize(
    "golden", marks.every(3, PIPELINES), ids=lambda golden: golden.name
)
