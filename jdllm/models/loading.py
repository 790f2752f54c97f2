"""A model as data: a static graph and a flat dict of arrays.

NNX modules describe the model; steps run `jax.jit` over plain dicts. Parameters
are keyed by dotted path, e.g. `layers.0.attention.w_qkv`, which is also the
target name in the weight tables.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jdllm import errors
from jdllm.checkpoint import (
    assemble,
    export,
    orbax_checkpoint,
    safetensors_source,
    source,
    weight_table,
)
from jdllm.device import devices, sharding
from jdllm.layers import moe
from jdllm.models import decoder, decoder_config, random_weights, registry, split
from jdllm.models.hf_config import refuse_quantised
from jdllm.options.config import DTYPES, LOAD_FORMATS
from jdllm.spec import ModelSpec

logger = logging.getLogger(__name__)

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model for a runner: static `graphdef`, `params`, and facts about the model.

    `config` and `spec` are those of the whole model. With a mesh, `graphdef` is the module of one
    rank, and parameters that are cut are arrays `[tp, *part]` (`sharding.py`).
    """

    graphdef: nnx.GraphDef
    params: Params
    config: decoder_config.DecoderConfig
    spec: ModelSpec
    hf_config: Mapping[str, Any]
    path: pathlib.Path | None = None
    mesh: Mesh | None = None


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    block_size: int | None = None,
    load_format: str = "auto",
    implementation: str = "auto",
    seed: int = 0,
    show_progress: bool = True,
    shards: sharding.Shards = sharding.ONE_RANK,
    mesh: Mesh | None = None,
    config: decoder_config.DecoderConfig | None = None,
) -> LoadedModel:
    """Returns the model of a local directory, with its parameters on the default device.

    dtype "auto" is the dtype of the checkpoint; router arrays stay float32 in every dtype.
    load_format "dummy" needs only config.json and draws weights from `seed`. With a `mesh`,
    parameters are split over it as `shards` (of `split.shards_of`) says; the model is the same.
    `config` is what `read_config` has returned for the directory and a block size, and has the
    adapter for drafts if `with_draft_adapter` has added it; by default it is read here, without.
    """
    directory = pathlib.Path(directory)
    if config is None:
        config = read_config(directory, block_size=block_size)
    elif block_size is not None:
        raise ValueError(f"{block_size=}: the config that is given has its own")
    hf_config = source.read_json(directory / source.CONFIG_NAME)
    family = registry.family(config.spec.architecture)
    chosen = resolve_load_format(directory, load_format)
    _log_adapters(directory, config)
    if chosen == "orbax" and dtype == "auto":
        dtype = orbax_checkpoint.stored_dtype(directory)
    abstract = functools.partial(
        family.abstract,
        dtype=resolve_dtype(dtype, hf_config),
        implementation=implementation,
        hash_embedding_positions=chosen == "dummy",
    )
    graphdef, arrays = abstract(config)
    place = None
    if mesh is not None:
        graphdef, _ = abstract(split.local_config(config, shards))
        place = split.Placement(
            cuts=split.cuts(config, arrays, shards), mesh=mesh, is_tied=config.tie_word_embeddings
        )
    of_adapter: Params = {}
    if config.has_draft_adapter and family.draft_adapter is not None:
        of_adapter = family.draft_adapter.load(
            config, arrays, directory, place or assemble.on_default_device
        )
        arrays = {path: array for path, array in arrays.items() if path not in of_adapter}
    match chosen:
        case "dummy":
            params = dict(
                random_weights.each(
                    arrays, seed=seed, place=place, num_layers=config.spec.num_layers
                )
            )
        case "orbax" if place is None:
            params = orbax_checkpoint.restore(directory, arrays, devices.used())
        case "orbax" if place is not None:
            params = dict(orbax_checkpoint.restore_placed_each(directory, arrays, place))
        case _:
            tensors = safetensors_source.SafetensorsSource(directory)
            unused = family.weights.unused
            fills = weight_table.match(
                family.weight_rows(config),
                tensors.shapes,
                is_unused=lambda name: name.startswith(unused),
                unread_dtypes=tensors.unread_dtypes,
            )
            put = assemble.on_default_device

            def prepare(path: str, array: np.ndarray) -> dict[str, jax.Array]:
                # Before the cut: what is done to the head is done along the whole vocabulary.
                if place is not None:
                    return place(path, np.asarray(family.prepare(config, path, array)))
                return {path: jnp.asarray(family.prepare(config, path, put(path, array)[path]))}

            params = assemble.assemble(
                tensors, fills, arrays, place=prepare, show_progress=show_progress
            )
    return LoadedModel(
        graphdef=graphdef,
        params=params | of_adapter,
        config=config,
        spec=config.spec,
        hf_config=hf_config,
        path=directory,
        mesh=mesh,
    )


def serving_params(params: Params, dtype: DTypeLike) -> Params:
    """Returns `params` with the work done that each step would otherwise repeat.

    Not for checkpoints or training: router weights of a bfloat16 model become bfloat16 parts.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return params
    return {
        path: moe.split_router_weight(array) if path.endswith(".router.weight") else array
        for path, array in params.items()
    }


def read_spec(directory: str | os.PathLike[str], *, block_size: int | None = None) -> ModelSpec:
    """Returns the facts in a local directory's config files, without reading any weight."""
    return read_config(directory, block_size=block_size).spec


def read_config(
    directory: str | os.PathLike[str], *, block_size: int | None = None
) -> decoder_config.DecoderConfig:
    """Returns the config of a local directory's model, without reading any weight."""
    directory = pathlib.Path(directory)
    hf_config = source.read_json(directory / source.CONFIG_NAME)
    refuse_quantised(hf_config)
    return registry.family(registry.architecture_of(hf_config)).parse_config(
        hf_config,
        block_size=block_size,
        generation_config=source.read_optional_json(directory / "generation_config.json"),
    )


def with_draft_adapter(
    config: decoder_config.DecoderConfig, directory: str | os.PathLike[str]
) -> decoder_config.DecoderConfig:
    """Returns the config of a directory's model with the adapter for drafts that lies there.

    Without one it is the same. Raises a ConfigError for an adapter that cannot be applied; no
    weight is read, only what its file holds.
    """
    directory, family = pathlib.Path(directory), registry.family(config.spec.architecture)
    adapter = family.draft_adapter
    if adapter is None or not adapter.is_in(directory):
        return config
    adapted = adapter.attach(config, directory)
    adapter.match(adapted, family.shapes(adapted), directory)
    return adapted


def _log_adapters(directory: pathlib.Path, config: decoder_config.DecoderConfig) -> None:
    """Says of each adapter beside the weights whether it is applied."""
    of_drafts = registry.family(config.spec.architecture).draft_adapter
    for path in sorted(directory.glob("*/adapter_config.json")):
        name = path.parent.name
        if of_drafts is None or name != of_drafts.folder:
            logger.warning(
                "%s: this adapter is not applied; the model runs with its own weights", name
            )
        elif config.has_draft_adapter:
            logger.info("%s: this adapter is applied to drafts", name)
        else:
            logger.info("%s: this adapter for drafts is not loaded", name)


def resolve_dtype(dtype: DTypeLike, hf_config: Mapping[str, Any]) -> jnp.dtype:
    """Returns the activation dtype; "auto" is the dtype in config.json, or else bfloat16."""
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    of_file = [one for one in ("dtype", "torch_dtype") if hf_config.get(one)]
    if name == "auto" and of_file:
        name = hf_config[of_file[0]]
        if name == "auto" or name not in DTYPES:
            raise errors.ConfigError(
                f"config.json: {of_file[0]}={errors.quote(name)} is none of "
                f"{', '.join(DTYPES[1:])}; pass the dtype that you want"
            )
    elif name == "auto":
        name = "bfloat16"
    if name not in DTYPES:
        raise errors.ConfigError(
            f"dtype={errors.quote(name)} is not supported; choose {', '.join(DTYPES)}"
        )
    return jnp.dtype(name)


def export_safetensors(
    architecture: str,
    config: decoder_config.DecoderConfig,
    params: Mapping[str, jax.Array],
    path: pathlib.Path,
) -> None:
    """Writes parameters, in their own dtypes, as one file with Hugging Face names and shapes."""
    export.export(path, registry.family(architecture).weight_rows(config), params)


def resolve_load_format(directory: pathlib.Path, load_format: str) -> str:
    """Returns what to load from a directory: "safetensors", "orbax" or "dummy"."""
    if load_format not in LOAD_FORMATS:
        raise errors.ConfigError(f"{load_format=} is unknown; choose {', '.join(LOAD_FORMATS)}")
    is_orbax = orbax_checkpoint.is_checkpoint(directory)
    if load_format == "orbax" and not is_orbax:
        raise errors.ConfigError(
            f"{directory} is no converted checkpoint: it holds no {orbax_checkpoint.MARKER_NAME}; "
            "make one with python -m jdllm.convert"
        )
    if load_format == "auto":
        return "orbax" if is_orbax else "safetensors"
    return load_format


def merge(graphdef: nnx.GraphDef, params: Mapping[str, jax.Array]) -> decoder.Decoder:
    """Returns the module with these arrays; it is cheap and meant for traced functions."""
    nested: dict[str | int, Any] = {}
    for path, array in params.items():
        *parents, leaf = path.split(".")
        node = nested
        for part in parents:
            node = node.setdefault(int(part) if part.isdigit() else part, {})
        node[leaf] = array
    return nnx.merge(graphdef, nested)


def apply(
    graphdef: nnx.GraphDef, params: Mapping[str, jax.Array], *args: Any, **kwargs: Any
) -> Any:
    """Returns the model's output: `merge`, then call."""
    return merge(graphdef, params)(*args, **kwargs)
