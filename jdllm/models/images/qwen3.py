"""Qwen3 as a text encoder: the output of the layer before the last (`hidden_states[-2]`).

Neither the last layer nor the final norm nor a head is built, and their tensors are not read. The
layers are those of the decoder that language models share; the rows of a batch are packed for
them, and attention unpacks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jdllm.layers import attention, mlp, rope
from jdllm.models import decoder, decoder_config, hf_config, key_rules
from jdllm.models.images import causal_text, component

_RULES = key_rules.KeyRules(
    architecture="Qwen3Model",
    model_type="qwen3",
    only={
        "model_type": ("qwen3",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
    },
    neutral={
        key: value
        for key, value in key_rules.FOREIGN_NEUTRAL_TO_DENSE.items()
        if key != "rope_scaling"  # `causal_text.rope_theta` reads it
    }
    | {"is_causal": True},
    # `use_sliding_window` turns the window off, and an encoder has no head.
    harmless=key_rules.names("sliding_window max_window_layers rope_scaling"),
)
_HEAD_DIM = 128  # what the model class assumes without the key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """The encoder's sizes; `num_layers` are those of the checkpoint, the encoder has one less."""

    vocab_size: int
    num_layers: int
    width: int  # of a feed-forward
    eps: float
    attention: attention.AttentionConfig

    @property
    def hidden_size(self) -> int:
        return self.attention.dim


class Qwen3TextEncoder(nnx.Module):
    """Embeddings of prompts; see `encode`. The implementation "xla" is differentiable."""

    def __init__(self, config: Qwen3Config, dtype: jnp.dtype, *, implementation: str = "auto"):
        layer = decoder_config.LayerConfig(
            attention=config.attention, feed_forward=mlp.MLPConfig(width=config.width)
        )
        self.config = config
        self.implementation = implementation
        self.word_embeddings = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List(
            decoder.DecoderLayer(layer, eps=config.eps, dtype=dtype, implementation=implementation)
            for _ in range(config.num_layers - 1)
        )

    def encode(
        self, ids: Int32[Array, "B L"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B L hidden_size"]:
        """Returns the embedding of every token, and zeros past the length of a row.

        The first `lens[b]` tokens of a row count. Neither the other tokens nor the bucket L nor
        the other rows change their embeddings. A row of length 0 is all zeros.
        """
        return self.encode_words(
            jnp.take(self.word_embeddings[...], ids, axis=0, mode="clip"), lens
        )

    def encode_words(
        self, words: Float[Array, "B L hidden_size"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B L hidden_size"]:
        """Returns what `encode` returns, given the tokens' rows of `word_embeddings`."""
        x, pending = causal_text.run(
            self.layers,
            words,
            lens,
            kind=self.config.attention.rope,
            implementation=self.implementation,
        )
        return causal_text.unpacked(functools.reduce(jnp.add, pending, x), lens, words.shape[1])


def _read(hf: Mapping[str, Any]) -> Qwen3Config:
    _RULES.check(hf)
    sizes = _RULES.sizes
    heads = hf_config.integer(hf, sizes.num_query_heads)
    kv_heads = hf_config.integer(hf, sizes.num_kv_heads)
    head_dim = hf_config.integer(hf, "head_dim", default=_HEAD_DIM)
    if heads % kv_heads:
        causal_text.refuse(
            f"{sizes.num_query_heads}={heads} is no multiple of {sizes.num_kv_heads}={kv_heads}"
        )
    if head_dim % 2:
        causal_text.refuse(f"head_dim={head_dim} must be even")
    eps = hf_config.number(hf, "rms_norm_eps")
    return Qwen3Config(
        vocab_size=hf_config.integer(hf, "vocab_size"),
        num_layers=hf_config.depth(hf, sizes),
        width=hf_config.integer(hf, sizes.intermediate_size),
        eps=eps,
        attention=attention.AttentionConfig(
            dim=hf_config.integer(hf, sizes.hidden_size),
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope.RopeConfig(rotary_dim=head_dim, theta=causal_text.rope_theta(hf)),
            qk_norm_eps=eps,
        ),
    )


def _weights(config: Qwen3Config) -> str:
    k = config.attention.num_query_heads
    v = k + config.attention.num_kv_heads
    end = v + config.attention.num_kv_heads
    return f"""
    embed_tokens.weight                          word_embeddings
    layers.{{i}}.input_layernorm.weight          layers.{{i}}.input_layernorm.weight
    layers.{{i}}.self_attn.q_proj.weight         layers.{{i}}.attention.w_qkv[0:{k}/{end}]
    layers.{{i}}.self_attn.k_proj.weight         layers.{{i}}.attention.w_qkv[{k}:{v}/{end}]
    layers.{{i}}.self_attn.v_proj.weight         layers.{{i}}.attention.w_qkv[{v}:{end}/{end}]
    layers.{{i}}.self_attn.q_norm.weight         layers.{{i}}.attention.query_layernorm.weight
    layers.{{i}}.self_attn.k_norm.weight         layers.{{i}}.attention.key_layernorm.weight
    layers.{{i}}.self_attn.o_proj.weight         layers.{{i}}.attention.w_out
    layers.{{i}}.post_attention_layernorm.weight layers.{{i}}.post_attention_layernorm.weight
    layers.{{i}}.mlp.gate_proj.weight            layers.{{i}}.mlp.w_gate_up[0/2]
    layers.{{i}}.mlp.up_proj.weight              layers.{{i}}.mlp.w_gate_up[1/2]
    layers.{{i}}.mlp.down_proj.weight            layers.{{i}}.mlp.w_down
    """


def _is_unused(config: Qwen3Config, name: str) -> bool:
    last = f"layers.{config.num_layers - 1}."
    return name in ("norm.weight", "lm_head.weight") or name.startswith(last)


COMPONENT = component.Component(
    class_names=("Qwen3Model", "Qwen3ForCausalLM"),
    read=_read,
    build=Qwen3TextEncoder,
    weights=_weights,
    is_unused=_is_unused,
    optional_prefix="model.",
    example={
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
)
