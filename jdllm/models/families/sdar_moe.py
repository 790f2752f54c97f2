"""SDAR-MoE (30B-A3B): Qwen3-MoE's stack, block after block; all layers are routed.

The router takes a softmax over all experts, and divides the weights of the chosen ones by their sum
if `norm_topk_prob` says so. There is no shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.layers import moe
from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.models.families import sdar
from jdllm.spec import DiffusionSpec

RULES = key_rules.KeyRules(
    architecture="SDARMoeForCausalLM",
    model_type="sdar_moe",
    only=sdar.RULES.only,
    neutral=key_rules.FOREIGN_NEUTRAL
    | {
        "attention_bias": False,
        "partial_rotary_factor": 1,
        "use_qk_norm": True,
        "use_qk_layernorm": True,
        "qk_layernorm": True,
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 0,
        "num_shared_experts": 0,
        "n_shared_experts": 0,
        "shared_expert_intermediate_size": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1,
        "scoring_func": "softmax",
        "score_function": "softmax",
        "expert_capacity": None,
    },
    read=key_rules.names("moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok"),
    harmless=sdar.RULES.harmless | key_rules.names("router_aux_loss_coef"),
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    experts = moe.MoEConfig(
        width=hf_config.integer(hf, "moe_intermediate_size"),
        shared_width=0,
        router=moe.RouterConfig(
            num_experts=hf_config.integer(hf, "num_experts"),
            experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
            scores="softmax",
            renormalizes=hf_config.flag(hf, "norm_topk_prob"),
            has_bias=False,
        ),
    )
    decoder_config.check_routing(experts.router)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim, experts=experts)
    attention = decoder_config.read_attention(hf, spec, has_qk_norm=True)
    return decoder_config.read_uniform(hf, RULES, spec, attention, experts)


FAMILY = family.Family(
    rules=RULES,
    defaults=sdar.DEFAULTS,
    read=_read,
    weights=table.WeightTable(
        layers="model.layers",
        rows=llama_names.STACK + llama_names.QK_NORMS + llama_names.EXPERTS,
    ),
    end_of_turn="<|im_end|>",
    example={
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
)
