"""LLaDA-MoE-7B-A1B: OLMoE's stack with a norm for each head of q and k, and without a mask.

Every layer is routed: a softmax over all experts, and the weights of the chosen ones as they are.
Every position sees the whole sequence, and logit row i predicts position i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.layers import moe
from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.spec import AttentionPattern, DiffusionSpec, LogitAlignment

# The defaults for configs without these facts: <|mask|> and <|endoftext|> of the published
# tokenizer. The sampler may choose any block size; the published evaluations use 32.
DEFAULTS = DiffusionSpec(
    block_size=32,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    attention_pattern=AttentionPattern.FULL,
    logit_alignment=LogitAlignment.SAME_POSITION,
)

RULES = key_rules.KeyRules(
    architecture="LLaDAMoEModelLM",
    model_type="llada",
    # The key of dense layers, of which no release has one.
    sizes=hf_config.SizeKeys(intermediate_size="dense_intermediate_size"),
    only={
        "hidden_act": ("silu",),
        "qk_layernorm": (True,),
        # What the published model class computes, whatever its config says.
        "norm_topk_prob": (None, False),
        "moe_router_score_function": (None, "softmax"),
    },
    neutral=key_rules.FOREIGN_NEUTRAL
    | {
        "attention_bias": False,
        "add_qkv_bias": False,
        "partial_rotary_factor": 1,
        "use_sliding_window": False,
        "sliding_window": None,
        "moe_router_enable_expert_bias": False,
        "shared_expert_intermediate_size": 0,
        "num_shared_experts": 0,
        "router_num_group": 1,
        "router_topk_group": 1,
        "routed_scaling_factor": 1,
        "expert_capacity": None,
    },
    read=key_rules.names("expert_intermediate_size moe_layer_freq num_experts num_experts_per_tok"),
    harmless=key_rules.names("router_aux_loss_coef"),
    missing={"qk_layernorm": None},
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    frequency = hf.get("moe_layer_freq")
    if frequency not in (None, 1, [1] * hf_config.depth(hf, RULES.sizes)):
        RULES.refuse("moe_layer_freq", frequency, "1 for every layer")
    experts = moe.MoEConfig(
        width=hf_config.integer(hf, "expert_intermediate_size"),
        shared_width=0,
        router=moe.RouterConfig(
            num_experts=hf_config.integer(hf, "num_experts"),
            experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
            scores="softmax",
            renormalizes=False,
            has_bias=False,
        ),
    )
    decoder_config.check_routing(experts.router)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim, experts=experts)
    attention = decoder_config.read_attention(hf, spec, has_qk_norm=True)
    return decoder_config.read_uniform(hf, RULES, spec, attention, experts)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=table.WeightTable(
        layers="model.layers",
        rows=llama_names.STACK + llama_names.QK_NORMS + llama_names.EXPERTS,
    ),
    end_of_turn="<|role_end|>",
    example={
        "qk_layernorm": True,
        "expert_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
)
