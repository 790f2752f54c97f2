"""Qwen2.5-VL as a text encoder: its language model's last hidden states, after the final norm.

Neither the vision tower nor the head is built, and their tensors are not read. Without images the
three axes of its rotary positions (M-RoPE) are equal: each part of a head turns by the place of the
token, as in a model with one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jdllm import errors
from jdllm.layers import attention, norm, rope
from jdllm.models import hf_config, key_rules
from jdllm.models.images import causal_text, component, host_weights

_RULES = key_rules.KeyRules(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    only={
        "model_type": ("qwen2_5_vl", "qwen2_5_vl_text"),
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    },
    neutral={
        key: value
        for key, value in key_rules.FOREIGN_NEUTRAL_TO_DENSE.items()
        if key != "rope_scaling"  # `causal_text.rope_theta` reads it
    },
    # `use_sliding_window` turns the window off; the tokens and the tower are of images.
    harmless=key_rules.names(
        """
        sliding_window max_window_layers rope_scaling text_config vision_config
        vision_start_token_id vision_end_token_id vision_token_id video_token_id
        """
    ),
)
_TEXT = "text_config"
_SECTIONS = "mrope_section"
_ROPE_TYPES = ("default", "mrope")


class Qwen25VLTextEncoder(causal_text.CausalText):
    """Embeddings of prompts; see `encode`."""

    def __init__(
        self, config: causal_text.TextConfig, dtype: jnp.dtype, *, implementation: str = "auto"
    ):
        super().__init__(config, dtype, num_layers=config.num_layers, implementation=implementation)
        self.norm = norm.RMSNorm(config.hidden_size, eps=config.eps, dtype=dtype)

    def encode(
        self, ids: Int32[Array, "B L"], lens: Int32[Array, " B"]
    ) -> Float[Array, "B L hidden_size"]:
        """Returns the embedding of every token, and zeros past the length of a row.

        The first `lens[b]` tokens of a row count. Neither the other tokens nor the bucket L nor
        the other rows change their embeddings. A row of length 0 is all zeros.
        """
        last = self.run(self.words(ids), lens)
        final_norm, (x, pending) = host_weights.fetched(self.norm, after=last)
        _, normed = final_norm.add(x, pending)
        return causal_text.unpacked(normed, lens, ids.shape[1])


def _read(hf: Mapping[str, Any]) -> causal_text.TextConfig:
    hf = _language_model(hf)
    _RULES.check(hf)
    sizes = _RULES.sizes
    heads, kv_heads = causal_text.head_counts(hf, sizes)
    head_dim = hf_config.shared_head_dim(hf, sizes)
    _check_sections(hf, head_dim)
    theta = causal_text.rope_theta(hf, types=_ROPE_TYPES, read=(_SECTIONS,))
    return causal_text.TextConfig(
        vocab_size=hf_config.integer(hf, "vocab_size"),
        num_layers=hf_config.depth(hf, sizes),
        width=hf_config.integer(hf, sizes.intermediate_size),
        eps=hf_config.number(hf, "rms_norm_eps"),
        attention=attention.AttentionConfig(
            dim=hf_config.integer(hf, sizes.hidden_size),
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope.RopeConfig(rotary_dim=head_dim, theta=theta),
            has_qkv_bias=True,
        ),
    )


def _language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the language model, which may stand in an object of their own."""
    inner = hf.get(_TEXT) or {}
    if not isinstance(inner, Mapping):
        causal_text.refuse(f"{_TEXT}={errors.quote(inner)} must be an object")
    return {**hf, **{key: value for key, value in inner.items() if value is not None}}


def _check_sections(hf: Mapping[str, Any], head_dim: int) -> None:
    """Raises unless the sections of the axes are all of a head: what is left out does not turn."""
    for name in ("rope_parameters", "rope_scaling"):
        options = hf.get(name)
        sections = options.get(_SECTIONS) if isinstance(options, Mapping) else None
        if sections is None:
            continue
        is_list = isinstance(sections, list) and all(type(one) is int for one in sections)
        if not is_list or 2 * sum(sections) != head_dim:
            causal_text.refuse(
                f"{name}.{_SECTIONS}={errors.quote(sections)} must be integers whose sum is half "
                f"of the {head_dim} dims of a head"
            )


def _weights(config: causal_text.TextConfig) -> str:
    return (
        causal_text.WEIGHTS
        + "norm.weight norm.weight\n"
        + causal_text.qkv_weights(config, "weight")
        + causal_text.qkv_weights(config, "bias")
    )


def _is_unused(_config: causal_text.TextConfig, name: str) -> bool:
    return name == "lm_head.weight" or name.startswith("visual.")


COMPONENT = component.Component(
    class_names=("Qwen2_5_VLForConditionalGeneration",),
    read=_read,
    build=Qwen25VLTextEncoder,
    weights=_weights,
    is_unused=_is_unused,
    optional_prefix="model.",
    example={
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
)
