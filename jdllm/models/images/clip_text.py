"""CLIP's text model as a text encoder: one vector for a prompt (`pooler_output`).

Every prompt has the same number of ids: its pads are end tokens, and causal attention keeps them
from the row of the first one, which is the result. All is as transformers 5.23 computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from jdllm import errors
from jdllm.layers import linear, norm
from jdllm.models import hf_config, key_rules
from jdllm.models.images import component, host_weights

_RULES = key_rules.KeyRules(
    architecture="CLIPTextModel",
    model_type="clip_text_model",
    only={"model_type": ("clip_text_model",), "hidden_act": ("quick_gelu",)},
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE,
    read=key_rules.names("layer_norm_eps"),
    # The projection stands behind the result; the others are of training.
    harmless=key_rules.names("projection_dim dropout initializer_factor logit_scale_init_value"),
)
# What the model class assumes for missing keys.
_MISSING: Mapping[str, Any] = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}
# The model type of a config of both halves of CLIP, and its key with the config of the text half.
_WHOLE, _TEXT = "clip", "text_config"
# Early configs say 2, whatever the vocabulary has as its end token: its id is the largest.
_LEGACY_EOS = 2
_QUICK_GELU = 1.702


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClipTextConfig:
    """The encoder's sizes; `max_positions` are the ids of every prompt."""

    vocab_size: int
    hidden_size: int
    width: int  # of a feed-forward
    num_layers: int
    num_heads: int
    max_positions: int
    eps: float
    eos_token_id: int


class Layer(nnx.Module):
    """Attention and feed-forward, each with a norm before it; `qkv` holds q, then k, then v."""

    def __init__(self, config: ClipTextConfig, *, dtype: jnp.dtype, implementation: str):
        D = config.hidden_size
        self.num_heads, self.implementation = config.num_heads, implementation
        self.layer_norm1 = norm.LayerNorm(D, eps=config.eps, dtype=dtype)
        self.qkv = linear.Linear(D, 3 * D, dtype=dtype)
        self.out = linear.Linear(D, D, dtype=dtype)
        self.layer_norm2 = norm.LayerNorm(D, eps=config.eps, dtype=dtype)
        self.fc1 = linear.Linear(D, config.width, dtype=dtype)
        self.fc2 = linear.Linear(config.width, D, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        B, T, D = x.shape
        qkv = self.qkv(self.layer_norm1(x)).reshape(B, T, 3, self.num_heads, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))  # [B, T, N, H]
        attended = pallas_kernels.padded_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        x = x + self.out(attended.reshape(B, T, D))
        h = self.fc1(self.layer_norm2(x))
        return x + self.fc2(h * jax.nn.sigmoid(_QUICK_GELU * h))


class ClipTextEncoder(nnx.Module):
    """Vectors of prompts; see `encode`."""

    def __init__(self, config: ClipTextConfig, dtype: jnp.dtype, *, implementation: str = "auto"):
        D = config.hidden_size
        self.config = config
        self.token_embedding = nnx.Param(jnp.zeros((config.vocab_size, D), dtype))
        self.position_embedding = nnx.Param(jnp.zeros((config.max_positions, D), dtype))
        self.layers = nnx.List(
            Layer(config, dtype=dtype, implementation=implementation)
            for _ in range(config.num_layers)
        )
        self.final_layer_norm = norm.LayerNorm(D, eps=config.eps, dtype=dtype)

    def encode(self, ids: Int32[Array, "B T"]) -> Float[Array, "B D"]:
        """Returns the vector of the first end token of each row; T is `max_positions`.

        What a row without an end token gives, such as padding of a batch, means nothing.
        """
        last = self.hidden_states(ids)[-1]
        final_norm, last = host_weights.fetched(self.final_layer_norm, after=last)
        return jnp.take_along_axis(final_norm(last), self._ends(ids)[:, None, None], axis=1)[:, 0]

    def hidden_states(self, ids: Int32[Array, "B T"]) -> list[Float[Array, "B T D"]]:
        """Returns the embeddings, and what each layer makes of them."""
        table = host_weights.on_device(self.token_embedding[...])
        words = jnp.take(table, ids, axis=0, mode="clip")
        words += host_weights.on_device(self.position_embedding[...])
        return host_weights.in_turn(self.layers, words, lambda layer, x: layer(x))

    def _ends(self, ids: Int32[Array, "B T"]) -> Int32[Array, " B"]:
        eos = self.config.eos_token_id
        return jnp.argmax(ids if eos == _LEGACY_EOS else ids == eos, axis=-1)


def _read(hf: Mapping[str, Any]) -> ClipTextConfig:
    if hf.get("model_type") == _WHOLE and hf.get(_TEXT) is not None:
        hf = hf[_TEXT]
        if not isinstance(hf, Mapping):
            raise errors.ConfigError(f"config.json: {_TEXT}={errors.quote(hf)} must be an object")
    _RULES.check(hf)
    given = {**_MISSING, **{key: value for key, value in hf.items() if value is not None}}
    sizes = _RULES.sizes
    hidden = hf_config.integer(given, sizes.hidden_size)
    heads = hf_config.integer(given, sizes.num_query_heads)
    if hidden % heads:
        raise errors.ConfigError(
            f"config.json: {sizes.hidden_size}={hidden} is no multiple of "
            f"{sizes.num_query_heads}={heads}"
        )
    return ClipTextConfig(
        vocab_size=hf_config.integer(given, "vocab_size"),
        hidden_size=hidden,
        width=hf_config.integer(given, sizes.intermediate_size),
        num_layers=hf_config.depth(given, sizes),
        num_heads=heads,
        max_positions=hf_config.integer(given, sizes.max_position_embeddings),
        eps=hf_config.number(given, "layer_norm_eps"),
        eos_token_id=hf_config.integer(given, "eos_token_id", low=0),
    )


_WEIGHTS = """
embeddings.token_embedding.weight              token_embedding
embeddings.position_embedding.weight           position_embedding
encoder.layers.{i}.layer_norm1.weight          layers.{i}.layer_norm1.weight
encoder.layers.{i}.layer_norm1.bias            layers.{i}.layer_norm1.bias
encoder.layers.{i}.self_attn.q_proj.weight     layers.{i}.qkv.weight[0/3]
encoder.layers.{i}.self_attn.q_proj.bias       layers.{i}.qkv.bias[0/3]
encoder.layers.{i}.self_attn.k_proj.weight     layers.{i}.qkv.weight[1/3]
encoder.layers.{i}.self_attn.k_proj.bias       layers.{i}.qkv.bias[1/3]
encoder.layers.{i}.self_attn.v_proj.weight     layers.{i}.qkv.weight[2/3]
encoder.layers.{i}.self_attn.v_proj.bias       layers.{i}.qkv.bias[2/3]
encoder.layers.{i}.self_attn.out_proj.weight   layers.{i}.out.weight
encoder.layers.{i}.self_attn.out_proj.bias     layers.{i}.out.bias
encoder.layers.{i}.layer_norm2.weight          layers.{i}.layer_norm2.weight
encoder.layers.{i}.layer_norm2.bias            layers.{i}.layer_norm2.bias
encoder.layers.{i}.mlp.fc1.weight              layers.{i}.fc1.weight
encoder.layers.{i}.mlp.fc1.bias                layers.{i}.fc1.bias
encoder.layers.{i}.mlp.fc2.weight              layers.{i}.fc2.weight
encoder.layers.{i}.mlp.fc2.bias                layers.{i}.fc2.bias
final_layer_norm.weight                        final_layer_norm.weight
final_layer_norm.bias                          final_layer_norm.bias
"""


# 0, 1, 2, ... of old files, and what comes after the result in a whole CLIP and in its text half.
_UNUSED = (
    "embeddings.position_ids",
    "text_projection.weight",
    "visual_projection.weight",
    "logit_scale",
)


def _is_unused(_config: ClipTextConfig, name: str) -> bool:
    return name in _UNUSED or name.startswith("vision_model.")


COMPONENT = component.Component(
    class_names=("CLIPTextModel",),
    file_class_names=("CLIPTextModelWithProjection", "CLIPModel"),
    read=_read,
    build=ClipTextEncoder,
    weights=lambda _: _WEIGHTS,
    is_unused=_is_unused,
    optional_prefix="text_model.",
    example={
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 8,
        "eos_token_id": 31,
    },
)
