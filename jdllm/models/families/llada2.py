"""LLaDA2 (2.0, 2.1 and 2.2, MoE): dense layers first, then routed ones; norms of q and k.

Published configs leave out a few facts; constants here supply them. Experts come in three forms:
split per expert (published checkpoints), merged over experts (dFactory), and with gate and up
already fused (dInfer).

LLaDA2.2 is the same forward with another limit of the router. `expert_capacity` alone switches it
on: the keys of the groups are still there, and mean nothing then. Its two edit tokens are rows of
the vocabulary that no tokenizer file names, so only config.json says which they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdllm import errors
from jdllm.layers import mlp, moe
from jdllm.models import decoder_config, family, hf_config, key_rules, table
from jdllm.spec import DiffusionSpec, EditTokens

# The published configs lack these: the block size of training, <|mask|> and <|endoftext|>.
DEFAULTS = DiffusionSpec(block_size=32, mask_token_id=156895, eos_token_ids=(156892,))

RULES = key_rules.KeyRules(
    architecture="LLaDA2MoeModelLM",
    model_type="llada2_moe",
    only={
        "use_qk_norm": (True,),
        "use_sliding_window": (False,),
        "use_bias": (False,),
        "use_qkv_bias": (False,),
        "norm_softmax": (False,),
        "norm_topk_prob": (True,),
        "moe_router_enable_expert_bias": (True,),
        "score_function": ("sigmoid",),
        "router_dtype": ("fp32", "float32"),
        "hidden_act": ("silu",),
    },
    neutral=key_rules.FOREIGN_NEUTRAL
    | {
        "attention_bias": False,
        "use_qk_layernorm": True,
        "qk_layernorm": True,
        "moe_layer_freq": 1,
        "decoder_sparse_step": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    read=key_rules.names(
        """
        delete_token_id expert_capacity first_k_dense_replace moe_intermediate_size
        moe_shared_expert_intermediate_size n_group norm_head num_experts num_experts_per_tok
        num_shared_experts partial_rotary_factor rotary_dim routed_scaling_factor
        split_token_id topk_group
        """
    ),
    # Keys of the router's training, and of the window that `use_sliding_window` turns off.
    harmless=key_rules.names(
        """
        router_aux_loss_coef aux_loss_alpha seq_aux router_z_loss_coef
        mtp_loss_scaling_factor moe_router_bias_update_rate
        sliding_window max_window_layers
        """
    ),
)

WEIGHTS = table.WeightTable(
    layers="model.layers",
    rows="""
    model.word_embeddings.weight                  word_embeddings
    model.norm.weight                             norm.weight
    lm_head.weight                                lm_head
    {layer}.input_layernorm.weight                {layer}.input_layernorm.weight
    {layer}.post_attention_layernorm.weight       {layer}.post_attention_layernorm.weight
    {layer}.attention.query_layernorm.weight      {layer}.attention.query_layernorm.weight
    {layer}.attention.key_layernorm.weight        {layer}.attention.key_layernorm.weight
    {layer}.attention.query_key_value.weight      {layer}.attention.w_qkv
    {layer}.attention.dense.weight                {layer}.attention.w_out
    {layer}.mlp.gate_proj.weight                  {layer}.mlp.w_gate_up[gate]
    {layer}.mlp.up_proj.weight                    {layer}.mlp.w_gate_up[up]
    {layer}.mlp.down_proj.weight                  {layer}.mlp.w_down
    {layer}.mlp.gate.weight                       {layer}.mlp.router.weight[transposed]
    {layer}.mlp.gate.expert_bias                  {layer}.mlp.router.expert_bias
    {layer}.mlp.shared_experts.gate_proj.weight   {layer}.mlp.shared_experts.w_gate_up[moe_gate]
    {layer}.mlp.shared_experts.up_proj.weight     {layer}.mlp.shared_experts.w_gate_up[moe_up]
    {layer}.mlp.shared_experts.down_proj.weight   {layer}.mlp.shared_experts.w_down
    """,
    forms={
        "split": """
    {layer}.mlp.experts.{expert}.gate_proj.weight {layer}.mlp.experts.w_gate_up[{expert},moe_gate]
    {layer}.mlp.experts.{expert}.up_proj.weight   {layer}.mlp.experts.w_gate_up[{expert},moe_up]
    {layer}.mlp.experts.{expert}.down_proj.weight {layer}.mlp.experts.w_down[{expert}]
    """,
        "merged": """
    {layer}.mlp.experts.gate_proj                 {layer}.mlp.experts.w_gate_up[moe_gate]
    {layer}.mlp.experts.up_proj                   {layer}.mlp.experts.w_gate_up[moe_up]
    {layer}.mlp.experts.down_proj                 {layer}.mlp.experts.w_down
    """,
        "fused": """
    {layer}.mlp.w1                                {layer}.mlp.experts.w_gate_up[moe_gate_up]
    {layer}.mlp.w2                                {layer}.mlp.experts.w_down
    """,
    },
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LLaDA2Config(decoder_config.DecoderConfig):
    """A LLaDA2 model; with `norm_head`, the checkpoint holds the LM head before normalisation."""

    norm_head: bool


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> LLaDA2Config:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    num_layers = hf_config.depth(hf, RULES.sizes)
    num_dense = hf_config.integer(hf, "first_k_dense_replace", default=0, low=0)
    experts, is_routed = _experts(hf, diffusion), num_dense < num_layers
    diffusion = _with_edit_tokens(hf, diffusion)
    spec = decoder_config.read_spec(
        hf,
        RULES,
        diffusion,
        head_dim=head_dim,
        rotary_dim=hf_config.rotary_dim(hf, head_dim),
        experts=experts if is_routed else None,
    )
    if is_routed:
        decoder_config.check_routing(experts.router)
    attention = decoder_config.read_attention(hf, spec, has_qk_norm=True)
    width = hf_config.integer(hf, RULES.sizes.intermediate_size)
    kinds = (mlp.MLPConfig(width=width), experts)
    config = LLaDA2Config(
        spec=spec,
        layers=tuple(
            decoder_config.LayerConfig(attention=attention, feed_forward=kinds[i >= num_dense])
            for i in range(num_layers)
        ),
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=hf_config.flag(hf, RULES.sizes.tie_word_embeddings),
        norm_head=hf_config.flag(hf, "norm_head"),
    )
    if config.norm_head and config.tie_word_embeddings:
        raise errors.ConfigError("config.json: norm_head needs tie_word_embeddings=false")
    return config


def _experts(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> moe.MoEConfig:
    width = hf_config.integer(hf, "moe_intermediate_size")
    shared_width = width * hf_config.integer(hf, "num_shared_experts", default=0, low=0)
    if shared_width:
        key = "moe_shared_expert_intermediate_size"
        shared_width = hf_config.integer(hf, key, default=shared_width)
    router = moe.RouterConfig(
        num_experts=hf_config.integer(hf, "num_experts"),
        experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
        num_groups=hf_config.integer(hf, "n_group", default=1),
        kept_groups=hf_config.integer(hf, "topk_group", default=1),
        scaling_factor=hf_config.number(hf, "routed_scaling_factor"),
    )
    if hf_config.integer(hf, "expert_capacity", default=0, low=0):
        router = _by_blocks(hf, router, diffusion.block_size)
    return moe.MoEConfig(width=width, shared_width=shared_width, router=router)


def _by_blocks(
    hf: Mapping[str, Any], router: moe.RouterConfig, block_size: int
) -> moe.RouterConfig:
    """Returns the router with LLaDA2.2's limit, which replaces that of the groups."""
    own = hf_config.integer(hf, "block_size", default=DEFAULTS.block_size)
    if block_size != own:
        raise errors.ConfigError(
            f"block_size={block_size} must be block_size={own} of config.json: with "
            f"expert_capacity={hf['expert_capacity']} the router chooses experts for whole blocks"
        )
    capacity = hf_config.integer(hf, "expert_capacity")
    if not router.experts_per_token <= capacity <= router.num_experts:
        raise errors.ConfigError(
            f"config.json: expert_capacity={capacity} must lie between "
            f"num_experts_per_tok={router.experts_per_token} and num_experts={router.num_experts}"
        )
    return dataclasses.replace(
        router, num_groups=1, kept_groups=1, block_size=block_size, block_capacity=capacity
    )


def _with_edit_tokens(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> DiffusionSpec:
    """Returns the facts with LLaDA2.2's edit tokens, if config.json has them."""
    keys = ("delete_token_id", "split_token_id")
    missing = [key for key in keys if hf.get(key) is None]
    if len(missing) == 2:
        return diffusion
    if missing:
        raise errors.ConfigError(
            f"config.json: {missing[0]} is missing; {' and '.join(keys)} come together"
        )
    last = hf_config.integer(hf, "vocab_size") - 1
    delete, split = (hf_config.integer(hf, key, low=0, high=last) for key in keys)
    if len({delete, split, diffusion.mask_token_id}) < 3:
        raise errors.ConfigError(
            f"config.json: delete_token_id={delete}, split_token_id={split} and "
            f"mask_token_id={diffusion.mask_token_id} must differ"
        )
    return dataclasses.replace(
        diffusion,
        edit_tokens=EditTokens(delete=delete, split=split),
        default_algorithm="JointThresholdInDel",
    )


def _prepare(config: LLaDA2Config, path: str, array: family.AnyArray) -> family.AnyArray:
    """Returns a parameter; with `norm_head`, L2-normalises the LM head along the vocabulary."""
    if not config.norm_head or path != "lm_head":
        return array
    head = array.astype(np.float32)
    length = (head * head).sum(axis=0, keepdims=True) ** 0.5
    return (head / length.clip(1e-7)).astype(array.dtype)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=WEIGHTS,
    end_of_turn="<|role_end|>",
    example={
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.0,
    },
    prepare=_prepare,
)
