"""A pipeline in memory: its parts without weights, and the weights of all parts as one dict."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jdllm import device_facts, errors
from jdllm.imagegen import pipeline_folder
from jdllm.imagegen.pipelines import interface, registry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline:
    """What launches of images are compiled from."""

    pipeline: interface.Pipeline
    params: dict[str, jax.Array]


def load(
    folder: pipeline_folder.PipelineFolder,
    dtype: str,
    device: device_facts.DeviceFacts,
    *,
    seed: int = 0,
    show_progress: bool = True,
) -> LoadedPipeline:
    """Returns the pipeline of a folder, all of its components in one dtype.

    "auto" is bfloat16, but float32 on a CPU, which emulates bfloat16. Published checkpoints may
    hold float32, of which nothing is lost that an image would show. Raises a ConfigError for
    float16: activations of published transformers exceed its range, and the image is NaN
    (https://github.com/Tongyi-MAI/Z-Image/issues/14).
    """
    if dtype == "auto":
        dtype = "float32" if device.is_cpu else "bfloat16"
    if dtype == "float16":
        raise errors.ConfigError(
            "dtype=float16 is not served for models that make images: numbers inside their "
            "transformers exceed its largest, 65504; use bfloat16 or float32"
        )
    components = folder.load(
        dict.fromkeys(folder.models, dtype), seed=seed, show_progress=show_progress
    )
    parts = interface.Parts(
        graphdefs={name: one.graphdef for name, one in components.items()},
        configs={name: one.config for name, one in components.items()},
        schedule=folder.schedule,
        dtype=jnp.dtype(dtype),
        request_defaults=folder.request_defaults,
    )
    params = {
        interface.prefix_of(name) + path: array
        for name, one in components.items()
        for path, array in one.params.items()
    }
    return LoadedPipeline(
        pipeline=registry.PIPELINES[folder.class_name].build(parts), params=params
    )
