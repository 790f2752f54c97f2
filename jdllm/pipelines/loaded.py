"""A pipeline in memory: its parts without weights, and the weights of all parts as one dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jdllm import errors
from jdllm.device import facts
from jdllm.models.images import host_weights
from jdllm.options.config import Quantization
from jdllm.pipelines import interface, registry
from jdllm.pipelines.folder import PipelineFolder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline:
    """What launches of images are compiled from; weights may be in the host's memory.

    Over a mesh the modules are those of a rank, and the numbers of the pipeline those of the whole.
    """

    pipeline: interface.Pipeline
    params: dict[str, jax.Array]

    def weight_bytes(self, *, on_host: bool) -> int:
        """Returns the bytes of the weights in one of the two memories, of each device."""
        return sum(
            array.addressable_shards[0].data.nbytes
            for array in self.params.values()
            if host_weights.is_on_host(array) == on_host
        )


def load(
    folder: PipelineFolder,
    dtype: str,
    device: facts.DeviceFacts,
    *,
    quantization: Quantization | None = None,
    seed: int = 0,
    show_progress: bool = True,
    offloads_text_encoders: bool = False,
    mesh: Mesh | None = None,
) -> LoadedPipeline:
    """Returns the pipeline of a folder, all of its components in one dtype, maybe over a mesh.

    With a `quantization` large weights of the transformer are quantised (`Component.fp8_weights`);
    with `offloads_text_encoders` these components wait in the host's memory.
    """
    dtype = resolve_dtype(dtype, device)
    layout = registry.PIPELINES[folder.class_name].layout
    away = layout.text_encoders if offloads_text_encoders else frozenset()
    graphdefs, params = {}, {}
    # Text encoders first, so that they have left the device when the others come.
    for name in sorted(folder.models, key=lambda name: name not in away):
        one = folder.load(
            {name: dtype},
            quantization=quantization,
            seed=seed,
            show_progress=show_progress,
            mesh=mesh,
        )[name]
        arrays = host_weights.moved_to_host(one.params) if name in away else one.params
        prefix = interface.prefix_of(name)
        params |= {prefix + path: array for path, array in arrays.items()}
        graphdefs[name] = one.graphdef
    return LoadedPipeline(pipeline=_built(folder, graphdefs, jnp.dtype(dtype)), params=params)


def resolve_dtype(dtype: str, device: facts.DeviceFacts) -> str:
    """Returns the dtype of all components.

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
    return dtype


def without_modules(folder: PipelineFolder, dtype: str) -> interface.Pipeline:
    """Returns a pipeline that knows its sizes and options and computes nothing."""
    return _built(folder, {}, jnp.dtype(dtype))


def without_weights(
    folder: PipelineFolder,
    dtype: jnp.dtype,
    *,
    quantization: Quantization | None = None,
    tp_size: int = 1,
) -> tuple[interface.Pipeline, dict[str, jax.ShapeDtypeStruct]]:
    """Returns a pipeline and the shapes of its parameters, without allocating memory.

    Over `tp_size` devices they are those of each.
    """
    abstract = {
        name: one.abstract(dtype, quantization=quantization, tp_size=tp_size)
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
    folder: PipelineFolder,
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
