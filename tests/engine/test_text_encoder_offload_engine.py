"""An engine whose text encoder waits in the host's memory gives the images of one that has it."""

from __future__ import annotations

import numpy as np
import pytest
from support import image_engine

import jdllm

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

ASKED = {"height": 96, "width": 96, "num_inference_steps": 2, "seed": 5, "output_type": "latent"}
PROMPTS = ["A red bicycle.", "two cats on a blue sofa", "A red bicycle."]


def test_images_and_the_caption_cache_are_those_of_an_engine_without_the_option():
    plain = image_engine.shared()
    expected = plain.generate(PROMPTS, use_tqdm=False, **ASKED)
    options = image_engine.OPTIONS | {"text_encoder_cpu_offload": True}
    with jdllm.ImageEngine(**options) as engine:
        found = engine.generate(PROMPTS, use_tqdm=False, **ASKED)
        first = engine.stats()
        engine.generate(PROMPTS, use_tqdm=False, **ASKED)
        again = engine.stats()
        assert engine.server_info()["text_encoder_cpu_offload"] is True
    # Launches of other sizes round differently.
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert first.caption_cache_misses_total == 2
    assert again.caption_cache_misses_total == 2, "captions that are known need no weights"
    whole = plain.stats()
    assert first.host_weight_memory_usage_gb > 0 == whole.host_weight_memory_usage_gb
    assert np.isclose(
        first.weight_memory_usage_gb + first.host_weight_memory_usage_gb,
        whole.weight_memory_usage_gb,
    )
