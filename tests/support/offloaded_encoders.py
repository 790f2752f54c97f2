"""The golden pipelines with their text encoders' weights in the host's memory."""

from __future__ import annotations

import functools

from support import image_launches

from jdllm.device import devices
from jdllm.pipelines import loaded
from jdllm.runner import model_runner
from jdllm.runner.image.kind import ImageKind


@functools.cache
def offloaded(golden):
    return loaded.load(
        golden.folder(),
        "auto",
        devices.facts(),
        show_progress=False,
        offloads_text_encoders=True,
    )


def encode_bucket(golden):
    return image_launches.encode_bucket(image_launches.ROWS, golden.tokens)


@functools.cache
def runner(golden):
    model = offloaded(golden)
    made = model_runner.ModelRunner(
        model.params, ImageKind(model.pipeline, golden.config), device=devices.facts()
    )
    size = golden.sizes[0]
    made.compile(
        [
            encode_bucket(golden),
            *golden.modulate_buckets,
            image_launches.step_bucket(size, tokens=golden.tokens),
            image_launches.decode_bucket(size, "latent"),
        ]
    )
    return made
