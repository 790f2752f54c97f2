"""T5's encoder as a text encoder (`T5EncoderModel`), as of version 1.1: a gated feed-forward.

Attention is full and its scores are not divided; a bias for each distance and head, shared by all
layers, is all it knows of positions. FLUX runs it without a mask, so pads are part of a prompt. A
batch may pad rows further, which is masked. All is as transformers 5.23 computes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jdllm import errors
from jdllm.layers import norm
from jdllm.models import hf_config, key_rules
from jdllm.models.images import component, host_weights

_FEED_FORWARD = "gated-gelu"
_RULES = key_rules.KeyRules(
    architecture="T5EncoderModel",
    model_type="t5",
    only={
        "model_type": ("t5",),
        "dense_act_fn": ("gelu_new",),
        "is_gated_act": (True,),
    },
    neutral={
        key: value
        for key, value in key_rules.FOREIGN_NEUTRAL_TO_DENSE.items()
        if key != "is_encoder_decoder"  # the encoder of such a model
    },
    sizes=hf_config.SizeKeys(
        hidden_size="d_model",
        intermediate_size="d_ff",
        num_layers="num_layers",
        num_query_heads="num_heads",
    ),
    read=key_rules.names(
        """
        d_kv feed_forward_proj layer_norm_epsilon relative_attention_max_distance
        relative_attention_num_buckets
        """
    ),
    harmless=key_rules.names(
        """
        is_encoder_decoder num_decoder_layers dropout_rate classifier_dropout initializer_factor
        output_past n_positions scale_decoder_outputs
        """
    ),
)
# What the model class assumes for missing keys.
_MISSING: Mapping[str, Any] = {
    "d_kv": 64,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """The encoder's sizes; distances of `max_distance` and more share a bucket."""

    vocab_size: int
    d_model: int
    d_kv: int  # of a head
    d_ff: int
    num_layers: int
    num_heads: int
    num_buckets: int
    max_distance: int
    eps: float

    def __post_init__(self) -> None:
        # Of the buckets of one direction, half are for single distances.
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets // 4:
            raise errors.ConfigError(
                f"config.json: relative_attention_num_buckets={self.num_buckets} must be a "
                "multiple of 4, and relative_attention_max_distance="
                f"{self.max_distance} larger than a quarter of it"
            )


class Layer(nnx.Module):
    """Attention and feed-forward, each with a norm before it.

    `w_qkv` holds q, then k, then v; `w_gate_up` holds wi_0, which the GELU is for, then wi_1.
    """

    def __init__(self, config: T5Config, *, dtype: jnp.dtype):
        D, heads = config.d_model, config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.norm_1 = norm.RMSNorm(D, eps=config.eps, dtype=dtype)
        self.w_qkv = nnx.Param(jnp.zeros((3 * heads, D), dtype))
        self.w_out = nnx.Param(jnp.zeros((D, heads), dtype))
        self.norm_2 = norm.RMSNorm(D, eps=config.eps, dtype=dtype)
        self.w_gate_up = nnx.Param(jnp.zeros((2 * config.d_ff, D), dtype))
        self.w_down = nnx.Param(jnp.zeros((D, config.d_ff), dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        bias: Float32[Array, "N T T"],
        is_own: Bool[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        B, T, _ = x.shape
        qkv = jnp.einsum("BTD,FD->BTF", self.norm_1(x), self.w_qkv[...])
        qkv = qkv.reshape(B, T, 3, self.num_heads, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))  # [B, T, N, H]
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32) + bias
        scores = jnp.where(is_own[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        attended = jnp.einsum("BNTS,BSNH->BTNH", weights, v).reshape(B, T, -1)
        x = x + jnp.einsum("BTF,DF->BTD", attended, self.w_out[...])
        h = jnp.einsum("BTD,FD->BTF", self.norm_2(x), self.w_gate_up[...])
        gate, up = jnp.split(h, 2, axis=-1)
        h = jax.nn.gelu(gate, approximate=True) * up
        return x + jnp.einsum("BTF,DF->BTD", h, self.w_down[...])


class T5Encoder(nnx.Module):
    """Embeddings of prompts; see `encode`."""

    def __init__(self, config: T5Config, dtype: jnp.dtype):
        self.config = config
        self.word_embeddings = nnx.Param(jnp.zeros((config.vocab_size, config.d_model), dtype))
        self.relative_attention_bias = nnx.Param(
            jnp.zeros((config.num_buckets, config.num_heads), dtype)
        )
        self.layers = nnx.List(Layer(config, dtype=dtype) for _ in range(config.num_layers))
        self.final_norm = norm.RMSNorm(config.d_model, eps=config.eps, dtype=dtype)

    def encode(
        self, ids: Int32[Array, "B T"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B T d_model"]:
        """Returns the embedding of every token, and zeros past the length of a row.

        The first `lens[b]` ids of a row count, pads among them. Neither the other ids nor T nor
        the other rows change their embeddings.
        """
        is_own = jnp.arange(ids.shape[1]) < lens[:, None]
        last = self.hidden_states(ids, lens)[-1]
        final_norm, last = host_weights.fetched(self.final_norm, after=last)
        return jnp.where(is_own[:, :, None], final_norm(last), 0)

    def hidden_states(
        self, ids: Int32[Array, "B T"], lens: Int32[Array, " B"]
    ) -> list[Float[Array, "B T d_model"]]:
        """Returns the words, and what each layer makes of them; finite past the lengths."""
        is_own = jnp.arange(ids.shape[1]) < lens[:, None]
        bias = self._bias(ids.shape[1])
        table = host_weights.on_device(self.word_embeddings[...])
        words = jnp.take(table, ids, axis=0, mode="clip")
        return host_weights.in_turn(self.layers, words, lambda layer, x: layer(x, bias, is_own))

    def _bias(self, T: int) -> Float32[Array, "N T T"]:
        places = np.arange(T)
        found = buckets(
            places[None, :] - places[:, None],
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
        )
        table = host_weights.on_device(self.relative_attention_bias[...]).astype(jnp.float32)
        return jnp.moveaxis(table[found], -1, 0)


def buckets(
    distances: Int[np.ndarray, "Q K"], *, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "Q K"]:
    """Returns the buckets of distances, place of the key minus place of the query.

    The second half is for keys behind the query. In a half, the first half of the buckets has one
    distance each, and the others as many as make them equal on a logarithmic scale.
    """
    of_direction = num_buckets // 2
    exact = of_direction // 2
    distance = np.abs(distances)
    # In float32 and in this order, as the bounds of the buckets come from its rounding.
    share = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact))
    share /= np.float32(math.log(max_distance / exact))
    far = exact + (share * (of_direction - exact)).astype(np.int32)
    near_or_far = np.where(distance < exact, distance, np.minimum(far, of_direction - 1))
    return np.where(distances > 0, of_direction, 0) + near_or_far


def _read(hf: Mapping[str, Any]) -> T5Config:
    _RULES.check(hf)
    if hf.get("feed_forward_proj") != _FEED_FORWARD:
        _RULES.refuse("feed_forward_proj", hf.get("feed_forward_proj"), repr(_FEED_FORWARD))
    given = {**_MISSING, **{key: value for key, value in hf.items() if value is not None}}
    sizes = _RULES.sizes
    return T5Config(
        vocab_size=hf_config.integer(given, "vocab_size"),
        d_model=hf_config.integer(given, sizes.hidden_size),
        d_kv=hf_config.integer(given, "d_kv"),
        d_ff=hf_config.integer(given, sizes.intermediate_size),
        num_layers=hf_config.depth(given, sizes),
        num_heads=hf_config.integer(given, sizes.num_query_heads),
        num_buckets=hf_config.integer(given, "relative_attention_num_buckets"),
        max_distance=hf_config.integer(given, "relative_attention_max_distance"),
        eps=hf_config.number(given, "layer_norm_epsilon"),
    )


_WEIGHTS = """
shared.weight|encoder.embed_tokens.weight                              word_embeddings
encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight   relative_attention_bias
encoder.block.{i}.layer.0.layer_norm.weight                            layers.{i}.norm_1.weight
encoder.block.{i}.layer.0.SelfAttention.q.weight                       layers.{i}.w_qkv[0/3]
encoder.block.{i}.layer.0.SelfAttention.k.weight                       layers.{i}.w_qkv[1/3]
encoder.block.{i}.layer.0.SelfAttention.v.weight                       layers.{i}.w_qkv[2/3]
encoder.block.{i}.layer.0.SelfAttention.o.weight                       layers.{i}.w_out
encoder.block.{i}.layer.1.layer_norm.weight                            layers.{i}.norm_2.weight
encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight                   layers.{i}.w_gate_up[0/2]
encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight                   layers.{i}.w_gate_up[1/2]
encoder.block.{i}.layer.1.DenseReluDense.wo.weight                     layers.{i}.w_down
encoder.final_layer_norm.weight                                        final_norm.weight
"""


def _is_unused(_config: T5Config, name: str) -> bool:
    # The words a second time (if shared.weight is there), and the other half of the model.
    return name in ("encoder.embed_tokens.weight", "lm_head.weight") or name.startswith("decoder.")


COMPONENT = component.Component(
    class_names=("T5EncoderModel",),
    file_class_names=("T5ForConditionalGeneration", "T5Model"),
    read=_read,
    build=T5Encoder,
    weights=lambda _: _WEIGHTS,
    is_unused=_is_unused,
    example={
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 32,
        "feed_forward_proj": "gated-gelu",
    },
)
