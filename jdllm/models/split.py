"""A model split over ranks: the config of one rank, how each parameter is cut, what cannot be.

Modules of one rank are built from its config, so their shapes are those that a `shard_map` gives
them. The router keeps all experts, and the embedding its whole vocabulary. A tied head is a second
array, since it is split and the embedding is not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jdllm import errors
from jdllm.device import sharding
from jdllm.layers import attention, mlp, moe
from jdllm.models import decoder_config
from jdllm.spec import ModelSpec

Config = TypeVar("Config", bound=decoder_config.DecoderConfig)
HEAD, EMBEDDING = "lm_head", "word_embeddings"


def shards_of(
    config: decoder_config.DecoderConfig, tp_size: int, ep_size: int | None
) -> sharding.Shards:
    """Returns how a model is split; whole experts are spread unless `ep_size` is 1.

    Raises a ConfigError, which names sizes that would work, if the model cannot be split so.
    """
    shards = _shards(config, tp_size, ep_size)
    problem = _problem(config, shards)
    if problem is None:
        return shards
    options = [_shards(config, size, min(shards.ep, size)) for size in sharding.SIZES]
    fits = [str(one.tp) for one in options if _problem(config, one) is None]
    if shards.ep > 1 and _problem(config, dataclasses.replace(shards, ep=1)) is None:
        fits.append(f"{tp_size} with ep_size=1")
    raise errors.ConfigError(f"tp_size={tp_size}: {problem}; use tp_size {', '.join(fits)}")


def local_config(config: Config, shards: sharding.Shards) -> Config:
    """Returns the config of the module that runs on each rank; with one rank, the config itself."""
    if not shards.is_split:
        return config
    heads = _heads_of(config.spec).local(shards.tp)
    layers = tuple(_local_layer(layer, shards) for layer in config.layers)
    kv_heads = tuple(
        dataclasses.replace(one, count=layer.attention.num_kv_heads)
        for one, layer in zip(config.spec.kv_heads_of_layers, layers, strict=False)
    )
    return dataclasses.replace(
        config,
        spec=dataclasses.replace(
            config.spec,
            num_query_heads=heads.query,
            num_kv_heads=heads.kv,
            kv_heads_of_layers=kv_heads,
        ),
        layers=layers,
        dense=None if config.dense is None else _local_dense(config.dense, shards),
        tie_word_embeddings=False,
        shards=shards,
    )


def cuts(
    config: decoder_config.DecoderConfig,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    shards: sharding.Shards,
) -> dict[str, sharding.Cut | None]:
    """Returns how each parameter of the whole model is cut, None where every rank holds it whole.

    A tied model has a cut for its head, too.
    """
    found = {
        path: sharding.cut_of(path, one.shape, _heads_of_layer(config, path), shards)
        for path, one in shapes.items()
    }
    if config.tie_word_embeddings:
        shape = shapes[EMBEDDING].shape
        found[HEAD] = sharding.cut_of(HEAD, shape, _heads_of(config.spec), shards)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Puts the parameters of a model on a mesh, each rank's part on its device."""

    cuts: Mapping[str, sharding.Cut | None]
    mesh: Mesh
    is_tied: bool = False

    def __call__(self, path: str, array: np.ndarray) -> dict[str, jax.Array]:
        """Returns the parameter, and with a tied embedding the head, by path."""
        return {one: sharding.place(array, self.cuts[one], self.mesh) for one in self.paths(path)}

    def paths(self, path: str) -> tuple[str, ...]:
        """Returns what a parameter becomes: itself, and with a tied embedding the head."""
        return (path, HEAD) if self.is_tied and path == EMBEDDING else (path,)


def _shards(
    config: decoder_config.DecoderConfig, tp_size: int, ep_size: int | None
) -> sharding.Shards:
    has_experts = config.spec.moe is not None
    return sharding.Shards(
        tp=tp_size, ep=(tp_size if has_experts else 1) if ep_size is None else ep_size
    )


def _problem(config: decoder_config.DecoderConfig, shards: sharding.Shards) -> str | None:
    """Returns why the model cannot be split so, or None."""
    tp, ep = shards.tp, shards.ep
    if ep not in (1, tp):
        return f"ep_size={ep} must be 1 or tp_size"
    if ep > 1 and config.spec.moe is None:
        return f"ep_size={ep}, but the model has no experts"
    if config.spec.vocab_size % tp:
        return f"the vocabulary of {config.spec.vocab_size} tokens cannot be divided by {tp}"
    if config.dense is not None and config.dense.width % tp:
        return f"the dense feed-forwards' width {config.dense.width} cannot be divided by {tp}"
    problems = (_problem_of_layer(layer, shards) for layer in dict.fromkeys(config.layers))
    return next((problem for problem in problems if problem is not None), None)


def _problem_of_layer(layer: decoder_config.LayerConfig, shards: sharding.Shards) -> str | None:
    tp, heads, forward = shards.tp, layer.attention, layer.feed_forward
    if heads.num_query_heads % tp:
        return f"{heads.num_query_heads} query heads cannot be divided by {tp}"
    if heads.num_kv_heads % tp and tp % heads.num_kv_heads:
        return f"{heads.num_kv_heads} kv heads neither divide {tp} nor can be divided by it"
    if isinstance(forward, mlp.MLPConfig):
        widths = {"the feed-forward width": forward.width}
    else:
        widths = {"the shared experts' width": forward.shared_width}
        if shards.ep == 1:
            widths["the experts' width"] = forward.width
        elif forward.router.num_experts % tp:
            return f"{forward.router.num_experts} experts cannot be divided by {tp}"
    bad = [
        f"{name} {width} cannot be divided by {tp}" for name, width in widths.items() if width % tp
    ]
    return bad[0] if bad else None


def _local_layer(
    layer: decoder_config.LayerConfig, shards: sharding.Shards
) -> decoder_config.LayerConfig:
    heads = _heads_of(layer.attention).local(shards.tp)
    match layer.feed_forward:
        case mlp.MLPConfig() as dense:
            forward = _local_dense(dense, shards)
        case moe.MoEConfig() as experts:
            forward = dataclasses.replace(
                experts,
                width=experts.width if shards.ep > 1 else experts.width // shards.tp,
                shared_width=experts.shared_width // shards.tp,
                num_ranks=shards.ep,
            )
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(
            layer.attention, num_query_heads=heads.query, num_kv_heads=heads.kv
        ),
        feed_forward=forward,
    )


def _local_dense(dense: mlp.MLPConfig, shards: sharding.Shards) -> mlp.MLPConfig:
    return dataclasses.replace(dense, width=dense.width // shards.tp)


def _heads_of(
    sizes: attention.AttentionConfig | ModelSpec,
) -> sharding.Heads:
    return sharding.Heads(query=sizes.num_query_heads, kv=sizes.num_kv_heads, dim=sizes.head_dim)


def _heads_of_layer(config: decoder_config.DecoderConfig, path: str) -> sharding.Heads:
    layer = re.match(r"layers\.(\d+)\.", path)
    return _heads_of(config.layers[int(layer[1])].attention if layer else config.spec)
