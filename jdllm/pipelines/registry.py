"""The classes of pipelines that this engine serves: one readable dict, no discovery."""

from __future__ import annotations

from jdllm.pipelines import flux, interface, qwen_image, z_image

# By the class name in `model_index.json`.
PIPELINES: dict[str, type[interface.Pipeline]] = {
    "ZImagePipeline": z_image.ZImagePipeline,
    "FluxPipeline": flux.FluxPipeline,
    "QwenImagePipeline": qwen_image.QwenImagePipeline,
}
