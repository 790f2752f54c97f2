"""Qwen3 as a text encoder: the output of the layer before the last (`hidden_states[-2]`).

Neither the last layer nor the final norm nor a head is built, and their tensors are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jdllm.layers import attention, rope
from jdllm.models import hf_config, key_rules
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


class Qwen3TextEncoder(causal_text.CausalText):
    """Embeddings of prompts; see `encode`. The implementation "xla" is differentiable."""

    def __init__(
        self, config: causal_text.TextConfig, dtype: jnp.dtype, *, implementation: str = "auto"
    ):
        super().__init__(
            config, dtype, num_layers=config.num_layers - 1, implementation=implementation
        )

    def encode(
        self, ids: Int32[Array, "B L"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B L hidden_size"]:
        """Returns the embedding of every token, and zeros past the length of a row.

        The first `lens[b]` tokens of a row count. Neither the other tokens nor the bucket L nor
        the other rows change their embeddings. A row of length 0 is all zeros.
        """
        return self.encode_words(self.words(ids), lens)

    def encode_words(
        self, words: Float[Array, "B L hidden_size"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B L hidden_size"]:
        """Returns what `encode` returns, given the tokens' rows of `word_embeddings`."""
        x, pending = self.run(words, lens)
        return causal_text.unpacked(functools.reduce(jnp.add, pending, x), lens, words.shape[1])


def _read(hf: Mapping[str, Any]) -> causal_text.TextConfig:
    _RULES.check(hf)
    sizes = _RULES.sizes
    heads, kv_heads = causal_text.head_counts(hf, sizes)
    head_dim = hf_config.integer(hf, "head_dim", default=_HEAD_DIM)
    if head_dim % 2:
        causal_text.refuse(f"head_dim={head_dim} must be even")
    eps = hf_config.number(hf, "rms_norm_eps")
    return causal_text.TextConfig(
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


def _weights(config: causal_text.TextConfig) -> str:
    return (
        causal_text.WEIGHTS
        + causal_text.qkv_weights(config, "weight")
        + """
        layers.{i}.self_attn.q_norm.weight         layers.{i}.attention.query_layernorm.weight
        layers.{i}.self_attn.k_norm.weight         layers.{i}.attention.key_layernorm.weight
        """
    )


def _is_unused(config: causal_text.TextConfig, name: str) -> bool:
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
