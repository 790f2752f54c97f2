"""The classes of image components that this engine builds: one readable dict, no discovery."""

from __future__ import annotations

from typing import Any

from jdllm.models.images import (
    autoencoder_kl,
    autoencoder_kl_qwen_image,
    clip_text,
    component,
    flux,
    qwen3,
    qwen25_vl,
    qwen_image,
    t5,
    z_image,
)

# By the class name in `model_index.json`.
COMPONENTS: dict[str, component.Component[Any]] = {
    name: one
    for one in (
        qwen3.COMPONENT,
        qwen25_vl.COMPONENT,
        z_image.COMPONENT,
        qwen_image.COMPONENT,
        clip_text.COMPONENT,
        t5.COMPONENT,
        flux.COMPONENT,
        autoencoder_kl.COMPONENT,
        autoencoder_kl_qwen_image.COMPONENT,
    )
    for name in one.class_names
}
