"""The three models of a pipeline as they are trained: float32 weights in one flat dict.

Parameters have the names that a served pipeline gives them: the component's name, then the path.
Forward passes run on a copy in the compute dtype and in implementations that have gradients. Two
numbers stand beside the weights: what the latents of the autoencoder are shifted and scaled by, so
that they have mean 0 and variance 1. They are 0 until the autoencoder is done.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdllm import errors
from jdllm.checkpoint import assemble, safetensors_source, source
from jdllm.models import loading, random_weights
from jdllm.models.images import autoencoder_kl, component, qwen3, z_image
from jdllm.models.images.autoencoder import layers
from jdllm.models.images.autoencoder.config import AutoencoderConfig
from jdllm.pipelines import flow_schedule, interface
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines.z_image import ZImagePipeline
from jdllm.train.recipe import Params
from jdllm.train.scenes import tokenizer

TEXT, TRANSFORMER, VAE = "text_encoder", "transformer", "vae"
SHIFT, FACTOR = "latents.shift_factor", "latents.scaling_factor"
LATENTS_DTYPE = jnp.bfloat16  # of latents that wait for their steps
_LOG_VARIANCE = -4.0  # of drawn latents at the start
_GATE = 0.1  # of a block at the start
LEAST_DEVIATION = 1e-3  # of latents, by which they are divided
_COPIED = ("model_index.json", "generation_config.json", "scheduler", TEXT, TRANSFORMER, VAE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A pipeline to train, without weights; `folder` has its configs and its tokenizer."""

    folder: pathlib.Path
    components: Mapping[str, component.Component[Any]]
    configs: Mapping[str, Any]
    graphdefs: Mapping[str, nnx.GraphDef]
    shapes: Mapping[str, jax.ShapeDtypeStruct]  # in compute dtype, by full names
    schedule: flow_schedule.FlowSchedule

    def module(self, name: str, params: Params) -> Any:
        """Returns a model with float32 weights cast to the dtype of its forward pass."""
        prefix = interface.prefix_of(name)
        own = {
            path.removeprefix(prefix): params[path].astype(shape.dtype)
            for path, shape in self.shapes.items()
            if path.startswith(prefix)
        }
        return loading.merge(self.graphdefs[name], own)

    @property
    def vae_config(self) -> AutoencoderConfig:
        return self.configs[VAE]

    @property
    def pipeline(self) -> ZImagePipeline:
        """The pipeline that serves these models, for what it knows of sizes and steps."""
        dtype = self.shapes[f"{TRANSFORMER}.x_pad_token"].dtype
        parts = interface.Parts(
            graphdefs=self.graphdefs, configs=self.configs, schedule=self.schedule, dtype=dtype
        )
        return ZImagePipeline.build(parts)


def build(
    model_path: pathlib.Path, folder: pathlib.Path, dtype: str, *, attention: str = "xla"
) -> Networks:
    """Returns the models of a pipeline folder, copied without weights and with a new tokenizer."""
    _copy(model_path, folder)
    read = pipeline_folder.read(folder, load_format="dummy")
    if read.class_name != "ZImagePipeline" or read.schedule.use_dynamic_shifting:
        raise errors.ConfigError(f"{model_path}: only a ZImagePipeline of static shift is trained")
    components = {
        TEXT: _differentiable(qwen3.COMPONENT, "xla"),
        TRANSFORMER: _differentiable(z_image.COMPONENT, attention),
        VAE: dataclasses.replace(autoencoder_kl.WITH_ENCODER, build=_autoencoder),
    }
    configs = {
        TEXT: read.models[TEXT].config,
        TRANSFORMER: read.models[TRANSFORMER].config,
        # Latents are shifted and scaled here by numbers that are not known before training.
        VAE: dataclasses.replace(read.models[VAE].config, shift_factor=0.0, scaling_factor=1.0),
    }
    built = {
        name: one.abstract(configs[name], jnp.dtype(dtype)) for name, one in components.items()
    }
    return Networks(
        folder=folder,
        components=components,
        configs=configs,
        graphdefs={name: graphdef for name, (graphdef, _) in built.items()},
        shapes={
            interface.prefix_of(name) + path: shape
            for name, (_, shapes) in built.items()
            for path, shape in shapes.items()
        },
        schedule=read.schedule,
    )


def _differentiable(one: component.Component[Any], implementation: str) -> component.Component[Any]:
    build: Any = one.build
    return dataclasses.replace(one, build=functools.partial(build, implementation=implementation))


def _autoencoder(config: AutoencoderConfig, dtype: jnp.dtype) -> nnx.Module:
    vae = autoencoder_kl.AutoencoderKLWithEncoder(config, dtype)
    for _, module in nnx.iter_modules(vae):
        if isinstance(module, layers.Conv):
            module.has_fast_gradient = True
    return vae


def _copy(model_path: pathlib.Path, folder: pathlib.Path) -> None:
    for path in sorted(model_path.rglob("*.json")):
        place = path.relative_to(model_path)
        if place.parts[0] in _COPIED and not path.name.endswith(".index.json"):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(path.read_bytes())
    vocab_size = source.read_json(folder / TEXT / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise errors.ConfigError(f"{model_path}/{TEXT}/config.json: {vocab_size=} must be a number")
    if not (folder / "tokenizer" / "tokenizer.json").is_file():
        tokenizer.write(folder / "tokenizer", vocab_size=vocab_size)


def init_params(networks: Networks, seed: int) -> Params:
    """Returns float32 starting weights, with which every block does little and flow none."""
    params = random_weights.on_host(networks.shapes, seed=seed)
    depth = networks.configs[TEXT].num_layers
    for path, array in params.items():
        if path.startswith(TEXT) and path.endswith((".w_out", ".w_down")):
            array *= (2 * depth) ** -0.5
        elif path.startswith(VAE) and path.endswith((".conv2.kernel", ".w_out")):
            array *= 0.5
    words = params[f"{TEXT}.word_embeddings"]
    words *= 0.5 * words.shape[-1] ** 0.5
    for path in ("final_linear.weight", "final_modulation.weight", "modulation.weight"):
        params[f"{TRANSFORMER}.{path}"][:] = 0
    # The logarithms of variances: an autoencoder learns little from latents that are mostly noise.
    moments = params[f"{VAE}.encoder.conv_out.bias"]
    moments[len(moments) // 2 :] = _LOG_VARIANCE
    # Of each block: scale, gate, scale, gate; D of each.
    bias = params[f"{TRANSFORMER}.modulation.bias"]
    bias.reshape(-1, 2, networks.configs[TRANSFORMER].dim)[:, 1] = _GATE
    zero = np.zeros((), np.float32)
    return jax.device_put(params | {SHIFT: zero, FACTOR: zero})


def read_params(networks: Networks, folder: pathlib.Path) -> Params:
    """Returns the weights of a pipeline folder that a run wrote, in float32."""
    read = pipeline_folder.read(folder)
    found = {}
    for name, one in networks.components.items():
        model = read.models[name]
        tensors = safetensors_source.SafetensorsSource(model.path, base_name=model.base_name)
        fills = one.match(networks.configs[name], tensors.shapes, tensors.unread_dtypes)
        shapes = one.abstract(networks.configs[name], jnp.dtype(jnp.float32))[1]
        made = assemble.assemble(tensors, fills, shapes, show_progress=False, desc=name)
        found |= {interface.prefix_of(name) + path: array for path, array in made.items()}
    latents = read.models[VAE].config
    return found | {
        SHIFT: jnp.float32(latents.shift_factor),
        FACTOR: jnp.float32(latents.scaling_factor),
    }
