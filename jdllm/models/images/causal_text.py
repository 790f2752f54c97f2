"""What text encoders from causal language models share: sizes, layers over padded captions, tables.

The layers are those of the decoder that language models share. They take packed tokens, so all
captions of a batch are packed with their padding, and attention unpacks them.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from jdllm import errors
from jdllm.layers import attention, mlp, rope
from jdllm.models import decoder, decoder_config, hf_config
from jdllm.models.images import host_weights

_ROPE_KEYS = frozenset({"rope_theta", "rope_type", "type"})

Packed = Float[Array, "B*L D"]
Stream = tuple[Packed, tuple[Packed, ...]]  # the residual stream, and the arrays that it lacks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The sizes of a language model; `num_layers` are those of its checkpoint."""

    vocab_size: int
    num_layers: int
    width: int  # of a feed-forward
    eps: float
    attention: attention.AttentionConfig

    @property
    def hidden_size(self) -> int:
        return self.attention.dim


class CausalText(nnx.Module):
    """The embeddings and the first layers of a language model; classes of models add the rest."""

    def __init__(
        self, config: TextConfig, dtype: jnp.dtype, *, num_layers: int, implementation: str
    ):
        layer = decoder_config.LayerConfig(
            attention=config.attention, feed_forward=mlp.MLPConfig(width=config.width)
        )
        self.config = config
        self.implementation = implementation
        self.word_embeddings = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List(
            decoder.DecoderLayer(layer, eps=config.eps, dtype=dtype, implementation=implementation)
            for _ in range(num_layers)
        )

    def words(self, ids: Int32[Array, "B L"]) -> Float[Array, "B L hidden_size"]:
        """Returns the tokens' rows of `word_embeddings`."""
        table = host_weights.on_device(self.word_embeddings[...])
        return jnp.take(table, ids, axis=0, mode="clip")

    def run(self, words: Float[Array, "B L hidden_size"], lens: Int32[Array, " B"]) -> Stream:
        """Returns the residual stream after the layers, and the arrays that it still lacks.

        A token sees those before it in its row. What stands past the length of a row changes
        nothing in it.
        """
        B, L, _ = words.shape
        kind = self.config.attention.rope
        positions = jnp.tile(jnp.arange(L, dtype=jnp.int32), B)
        angles = rope.rotation(positions, kind)
        x = words.reshape(B * L, -1)
        attend = functools.partial(_attend, jnp.maximum(lens, 1), self.implementation)

        def step(layer: decoder.DecoderLayer, state: Stream) -> Stream:
            x, pending, _ = layer(*state, {kind: angles}, attend=attend, cache=None)
            return x, pending

        return host_weights.in_turn(self.layers, (x, ()), step)[-1]


def unpacked(x: Packed, lens: Int32[Array, " B"], L: int) -> Float[Array, "B L D"]:
    """Returns the rows of a batch, with zeros past their lengths."""
    x = x.reshape(len(lens), L, -1)
    return jnp.where((jnp.arange(L) < lens[:, None])[:, :, None], x, 0)


def _attend(
    lens: Int32[Array, " B"],
    implementation: str,
    projection: attention.Projection,
    cache: Array | None,
) -> tuple[Array, Array | None]:
    """Returns causal attention inside each of the packed rows, which all have the same bucket."""
    q, k, v = (x.reshape(len(lens), -1, *x.shape[1:]) for x in projection.heads())
    out = pallas_kernels.padded_attention(
        q, k, v, lens, is_causal=True, implementation=implementation
    )
    return out.reshape(-1, *out.shape[2:]), cache


def head_counts(hf: Mapping[str, Any], sizes: hf_config.SizeKeys) -> tuple[int, int]:
    """Returns how many heads q has, and k and v."""
    heads = hf_config.integer(hf, sizes.num_query_heads)
    kv_heads = hf_config.integer(hf, sizes.num_kv_heads)
    if heads % kv_heads:
        refuse(f"{sizes.num_query_heads}={heads} is no multiple of {sizes.num_kv_heads}={kv_heads}")
    return heads, kv_heads


def rope_theta(
    hf: Mapping[str, Any], *, types: tuple[str, ...] = ("default",), read: tuple[str, ...] = ()
) -> float:
    """Returns the base of the rotary frequencies, from the top level or from the rope options.

    transformers 4 calls these `rope_scaling`, transformers 5 `rope_parameters`. `types` are those
    that do not change the angles, `read` other keys that the caller reads.
    """
    found = {"rope_theta": hf["rope_theta"]} if hf.get("rope_theta") is not None else {}
    for name in ("rope_parameters", "rope_scaling"):
        options = hf.get(name) or {}
        if not isinstance(options, Mapping):
            refuse(f"{name}={errors.quote(options)} must be an object")
        for key in ("rope_type", "type"):
            if options.get(key, types[0]) not in types:
                refuse(f"{name}.{key}={errors.quote(options[key])} is not supported")
        for key, value in options.items():
            if key not in (*_ROPE_KEYS, *read) and value is not None:
                refuse(f"{name}.{key}={errors.quote(value)} is not supported")
        if options.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = options["rope_theta"]
    if not found:
        refuse("rope_theta is missing")
    values = {key: hf_config.number(found, key) for key in found}
    if len(set(values.values())) > 1:
        refuse(" and ".join(f"{key}={value:g}" for key, value in values.items()) + " disagree")
    return next(iter(values.values()))


def refuse(reason: str) -> typing.NoReturn:
    """Raises a ConfigError of a config.json."""
    raise errors.ConfigError(f"config.json: {reason}")


def qkv_weights(config: TextConfig, kind: Literal["weight", "bias"]) -> str:
    """Returns the rows of a weight table for q, k and v, which one parameter holds."""
    target = {"weight": "w_qkv", "bias": "b_qkv"}[kind]
    k = config.attention.num_query_heads
    v = k + config.attention.num_kv_heads
    end = v + config.attention.num_kv_heads
    return "".join(
        f"layers.{{i}}.self_attn.{name}_proj.{kind} "
        f"layers.{{i}}.attention.{target}[{begin}:{stop}/{end}]\n"
        for name, begin, stop in (("q", 0, k), ("k", k, v), ("v", v, end))
    )


# The other rows that do not differ between models.
WEIGHTS = """
embed_tokens.weight                          word_embeddings
layers.{i}.input_layernorm.weight            layers.{i}.input_layernorm.weight
layers.{i}.self_attn.o_proj.weight           layers.{i}.attention.w_out
layers.{i}.post_attention_layernorm.weight   layers.{i}.post_attention_layernorm.weight
layers.{i}.mlp.gate_proj.weight              layers.{i}.mlp.w_gate_up[0/2]
layers.{i}.mlp.up_proj.weight                layers.{i}.mlp.w_gate_up[1/2]
layers.{i}.mlp.down_proj.weight              layers.{i}.mlp.w_down
"""
