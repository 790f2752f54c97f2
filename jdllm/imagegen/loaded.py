"""A pipeline in memory: its parts without weights, and the weights of all parts as one dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jdllm import config as config_lib
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
    quantization: config_lib.Quantization | None = None,
    seed: int = 0,
    show_progress: bool = True,
) -> LoadedPipeline:
    """Returns the pipeline of a folder, all of its components in one dtype.

    With a `quantization` large weights of the transformer are quantised (`Component.fp8_weights`).

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
        dict.fromkeys(folder.models, dtype),
        quantization=quantization,
        seed=seed,
        show_progress=show_progress,
    )
    graphdefs = {name: one.graphdef for name, one in components.items()}
    params = {
        interface.prefix_of(name) + path: array
        for name, one in components.items()
        for path, array in one.params.items()
    }
    return LoadedPipeline(pipeline=_built(folder, graphdefs, jnp.dtype(dtype)), params=params)


def without_weights(
    folder: pipeline_folder.PipelineFolder,
    dtype: jnp.dtype,
    *,
    quantization: config_lib.Quantization | None = None,
) -> tuple[interface.Pipeline, dict[str, jax.ShapeDtypeStruct]]:
    """Returns a pipeline and the shapes of its parameters, without allocating memory."""
    abstract = {
        name: one.component.abstract(one.config, dtype, quantization=quantization)
        for name, one in folder.models.items()
    }
    shapes = {
        interface.prefix_of(name) + path: shape
        for name, (_, of_component) in abstract.items()
        for path, shape in of_component.items()
    }
    graphdefs = {name: graphdef for name, (graphdef, _) in abstract.items()}
    return _built(folder, graphdefs, dtype), shapes


def _built(
    folder: pipeline_folder.PipelineFolder,
    graphdefs: Mapping[str, nnx.GraphDef],
    dtype: jnp.dtype,
) -> interface.Pipeline:
    parts = interface.Parts(
        graphdefs=graphdefs,
        configs={name: one.config for name, one in folder.models.items()},
        schedule=folder.schedule,
        dtype=dtype,
        request_defaults=folder.request_defaults,
    )
    return registry.PIPELINES[folder.class_name].build(parts)
