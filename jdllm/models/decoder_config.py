"""Configs of decoder models as frozen dataclasses, independent of the keys of a config.json.

Each layer has its own description, so a model may have layers of several kinds; most families
repeat one. The functions read the parts that the config.json files of all families share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.device import sharding
from jdllm.layers import attention, mlp, moe, rope
from jdllm.models import hf_config, key_rules
from jdllm.spec import DiffusionSpec, ModelSpec, MoESpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer; with post-norms, a norm follows each sub-layer before the residual addition."""

    attention: attention.AttentionConfig
    feed_forward: mlp.MLPConfig | moe.MoEConfig
    has_post_norms: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The facts of a model, its layers in order, and options of the final norm and the LM head.

    `dense` is a feed-forward that the model has beside those of its layers' configs. With `shards`,
    heads and widths are those of one rank (`models/split.py`).
    """

    spec: ModelSpec
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    dense: mlp.MLPConfig | None = None
    shards: sharding.Shards = sharding.ONE_RANK

    @property
    def has_draft_adapter(self) -> bool:
        """Whether tokens of drafts use an adapter."""
        return any(layer.attention.out_adapter is not None for layer in self.layers)


def read_spec(
    hf: Mapping[str, Any],
    rules: key_rules.KeyRules,
    diffusion: DiffusionSpec,
    *,
    head_dim: int,
    rotary_dim: int | None = None,
    experts: moe.MoEConfig | None = None,
) -> ModelSpec:
    """Returns the model's facts for the engine; without `rotary_dim`, RoPE rotates whole heads.

    `experts` are those of the routed layers, or None if there is no such layer.
    """
    sizes = rules.sizes
    heads = hf_config.integer(hf, sizes.num_query_heads)
    return ModelSpec(
        architecture=rules.architecture,
        model_type=hf.get("model_type", rules.model_type),
        vocab_size=hf_config.integer(hf, "vocab_size"),
        hidden_size=hf_config.integer(hf, sizes.hidden_size),
        num_layers=hf_config.depth(hf, sizes),
        num_query_heads=heads,
        num_kv_heads=hf_config.integer(hf, sizes.num_kv_heads, default=heads),
        head_dim=head_dim,
        max_position_embeddings=hf_config.integer(hf, sizes.max_position_embeddings),
        diffusion=diffusion,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        moe=None if experts is None else _moe_spec(experts),
    )


def read_attention(
    hf: Mapping[str, Any],
    spec: ModelSpec,
    *,
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
) -> attention.AttentionConfig:
    """Returns the attention config of a model whose layers all have the same one."""
    return attention.AttentionConfig(
        dim=spec.hidden_size,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope=rope.RopeConfig(rotary_dim=spec.rotary_dim, theta=hf_config.rope_theta(hf)),
        qk_norm_eps=hf_config.number(hf, "rms_norm_eps") if has_qk_norm else None,
        has_qkv_bias=has_qkv_bias,
    )


def read_dense(
    hf: Mapping[str, Any],
    rules: key_rules.KeyRules,
    spec: ModelSpec,
    attention_config: attention.AttentionConfig,
) -> DecoderConfig:
    """Returns the config of a model whose layers are all the same, with a dense feed-forward."""
    width = hf_config.integer(hf, rules.sizes.intermediate_size)
    return read_uniform(hf, rules, spec, attention_config, mlp.MLPConfig(width=width))


def read_uniform(
    hf: Mapping[str, Any],
    rules: key_rules.KeyRules,
    spec: ModelSpec,
    attention_config: attention.AttentionConfig,
    feed_forward: mlp.MLPConfig | moe.MoEConfig,
) -> DecoderConfig:
    """Returns the config of a model whose layers are all the same."""
    layer = LayerConfig(attention=attention_config, feed_forward=feed_forward)
    return DecoderConfig(
        spec=spec,
        layers=(layer,) * spec.num_layers,
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=hf_config.flag(hf, rules.sizes.tie_word_embeddings),
    )


def check_routing(router: moe.RouterConfig) -> None:
    """Raises if the numbers of experts and groups do not fit together."""
    experts, groups, kept = router.num_experts, router.num_groups, router.kept_groups
    if experts % groups or (groups > 1 and experts // groups < 2) or kept > groups:
        raise errors.ConfigError(
            f"config.json: num_experts={experts} cannot form n_group={groups} groups of two or "
            f"more experts, with topk_group={kept} groups kept"
        )
    reachable = experts * kept // groups if groups > 1 else experts
    if router.experts_per_token > reachable:
        raise errors.ConfigError(
            f"config.json: num_experts_per_tok={router.experts_per_token} exceeds the "
            f"{reachable} experts a token can reach"
        )


def _moe_spec(experts: moe.MoEConfig) -> MoESpec:
    return MoESpec(
        num_experts=experts.router.num_experts,
        experts_per_token=experts.router.experts_per_token,
        num_groups=experts.router.num_groups,
        intermediate_size=experts.width,
    )
