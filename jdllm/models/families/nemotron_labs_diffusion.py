"""Nemotron-Labs-Diffusion (3B, 8B, 14B): Ministral's stack, causal but for the block in flight.

The forward pass is Llama's with YaRN and with queries that are scaled by their position. Committed
tokens see those before them. The positions of a block that is denoised see each other and all
tokens before them, and logit row i predicts position i. When the block is written, one causal
forward replaces its K,V.

Instruct releases have a folder `linear_spec_lora` beside their weights: an adapter of attention's
output projections for the forwards that draft. It changes no token, only how many are accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.layers import rope
from jdllm.models import (
    decoder_config,
    draft_adapter,
    family,
    hf_config,
    key_rules,
    llama_names,
    table,
)
from jdllm.spec import AttentionPattern, DiffusionSpec

DEFAULTS = DiffusionSpec(
    block_size=32,
    mask_token_id=100,
    eos_token_ids=(2,),
    attention_pattern=AttentionPattern.CAUSAL,
    default_algorithm="MaskedDiffusion",
)

RULES = key_rules.KeyRules(
    architecture="NemotronLabsDiffusionModel",
    model_type="nemotron_labs_diffusion",
    only={"hidden_act": ("silu",), "dlm_paradigm": ("bidirectional",)},
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE
    | {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        # "dream" would shift the logits of the block's forward, too.
        "dlm_type": "llada",
        "linear_spec_lora": None,
    },
    # Switches of the training program.
    harmless=key_rules.names("ar_loss_weight dlm_loss_weight dp_varying_mask_ratio"),
    rope_types=("yarn",),
    rope_read=key_rules.names(
        """
        factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
        llama_4_scaling_beta
        """
    ),
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    _check_rope(hf)
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    attention = decoder_config.read_attention(hf, spec)
    return decoder_config.read_dense(
        hf, RULES, spec, dataclasses.replace(attention, rope=_read_rope(hf, attention.rope))
    )


def _check_rope(hf: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a key of `rope_parameters` that is unknown or contradicted."""
    found = hf_config.rope_parameters(hf)
    if not found:
        raise errors.ConfigError("config.json: rope_parameters is missing")
    for key in sorted(found.keys() - RULES.rope_read - key_rules.ROPE_PARAMETERS):
        if found[key] is not None:
            RULES.refuse(f"rope_parameters.{key}", found[key], "no such key")
    theta = hf.get("rope_theta")
    if theta is not None and found.get("rope_theta") not in (None, theta):
        raise errors.ConfigError(
            f"config.json: rope_theta={errors.quote(theta)} disagrees with "
            f"rope_parameters.rope_theta={errors.quote(found['rope_theta'])}"
        )


def _read_rope(hf: Mapping[str, Any], plain: rope.RopeConfig) -> rope.RopeConfig:
    """Returns the rotation of a config whose `rope_parameters` have only known keys."""
    found = hf_config.rope_parameters(hf)
    if plain.theta <= 1:
        raise errors.ConfigError(f"config.json: rope_theta={plain.theta} must be above 1")

    def number(key: str) -> float:
        name = f"rope_parameters.{key}"
        return hf_config.number({name: found.get(key)}, name)

    length_key = "rope_parameters.original_max_position_embeddings"
    length = hf_config.integer(
        {length_key: found.get("original_max_position_embeddings")}, length_key
    )
    return dataclasses.replace(
        plain,
        yarn=rope.Yarn(
            factor=number("factor"),
            original_length=length,
            beta_fast=number("beta_fast"),
            beta_slow=number("beta_slow"),
            mscale=number("mscale"),
            mscale_all_dim=number("mscale_all_dim"),
        ),
        query_scale=rope.QueryScale(beta=number("llama_4_scaling_beta"), length=length),
    )


_LAYERS = "encoder.layers"
# Llama's rows under this model's names.
_STACK = (
    (llama_names.STACK + llama_names.DENSE)
    .replace("model.embed_tokens", "encoder.embed_tokens")
    .replace("model.norm", "encoder.norm")
    .replace("lm_head.weight", "diffusion_head.weight")
)

FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=table.WeightTable(layers=_LAYERS, rows=_STACK),
    draft_adapter=draft_adapter.DraftAdapter(
        folder="linear_spec_lora", layers=_LAYERS, module="self_attn.o_proj"
    ),
    end_of_turn=None,
    example={
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
)
