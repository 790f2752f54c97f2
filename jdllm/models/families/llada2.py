"""LLaDA2's HF config.json as one frozen dataclass, every key decided once.

See `hf_config`; the few LLaDA2 facts that published configs leave out come from
constants here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm import spec as spec_lib
from jdllm.models import decoder_config, hf_config

ARCHITECTURE = "LLaDA2MoeModelLM"

# Not in the published configs: the training block, <|mask|> and <|endoftext|>.
DEFAULTS = spec_lib.DiffusionSpec(block_size=32, mask_token_id=156895, eos_token_ids=(156892,))

_RULES = hf_config.KeyRules(
    architecture=ARCHITECTURE,
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
        "expert_capacity": (None,),
    },
    neutral=hf_config.FOREIGN_NEUTRAL
    | {
        "attention_bias": False,
        "use_qk_layernorm": True,
        "qk_layernorm": True,
        "moe_layer_freq": 1,
        "decoder_sparse_step": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    read=frozenset(
        """
        first_k_dense_replace head_dim hidden_size intermediate_size
        max_position_embeddings moe_intermediate_size
        moe_shared_expert_intermediate_size n_group norm_head num_attention_heads
        num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
        num_shared_experts partial_rotary_factor rms_norm_eps rope_theta rotary_dim
        routed_scaling_factor tie_word_embeddings topk_group vocab_size
        """.split()  # noqa: SIM905
    ),
    # Training of the router, and the window that `use_sliding_window` turns off.
    harmless=frozenset(
        """
        router_aux_loss_coef aux_loss_alpha seq_aux router_z_loss_coef
        mtp_loss_scaling_factor moe_router_bias_update_rate
        sliding_window max_window_layers
        """.split()  # noqa: SIM905
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LLaDA2Config(decoder_config.DecoderConfig):
    """Sizes and constants of one LLaDA2 model; `num_groups` 1 means no group limit."""

    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_groups: int
    kept_groups: int
    num_dense_layers: int
    routed_scaling_factor: float
    norm_head: bool

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether layer `layer` routes to experts instead of one dense MLP."""
        return layer >= self.num_dense_layers


def parse_config(
    hf: Mapping[str, Any],
    *,
    block_size: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> LLaDA2Config:
    """Returns the config of a LLaDA2 `config.json`; `block_size` overrides the model's own."""
    _RULES.check(hf)
    heads = hf_config.integer(hf, "num_attention_heads")
    hidden = hf_config.integer(hf, "hidden_size")
    head_dim = hf_config.integer(hf, "head_dim", default=hidden // heads)
    width = hf_config.integer(hf, "moe_intermediate_size")
    shared_width = width * hf_config.integer(hf, "num_shared_experts", default=0, low=0)
    if shared_width:
        shared_width = hf_config.integer(
            hf, "moe_shared_expert_intermediate_size", default=shared_width
        )
    num_layers = hf_config.integer(hf, "num_hidden_layers")
    num_dense_layers = hf_config.integer(hf, "first_k_dense_replace", default=0, low=0)
    experts = spec_lib.MoESpec(
        num_experts=hf_config.integer(hf, "num_experts"),
        experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
        num_groups=hf_config.integer(hf, "n_group", default=1),
        intermediate_size=width,
    )
    config = LLaDA2Config(
        intermediate_size=hf_config.integer(hf, "intermediate_size"),
        moe_intermediate_size=width,
        shared_intermediate_size=shared_width,
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        num_groups=experts.num_groups,
        kept_groups=hf_config.integer(hf, "topk_group", default=1),
        num_dense_layers=num_dense_layers,
        routed_scaling_factor=hf_config.number(hf, "routed_scaling_factor"),
        rope_theta=hf_config.rope_theta(hf),
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=hf_config.flag(hf, "tie_word_embeddings"),
        norm_head=hf_config.flag(hf, "norm_head"),
        spec=spec_lib.ModelSpec(
            architecture=ARCHITECTURE,
            model_type=hf.get("model_type", "llada2_moe"),
            vocab_size=hf_config.integer(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=num_layers,
            num_query_heads=heads,
            num_kv_heads=hf_config.integer(hf, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            max_position_embeddings=hf_config.integer(hf, "max_position_embeddings"),
            diffusion=hf_config.diffusion(hf, generation_config, block_size, DEFAULTS),
            rotary_dim=_rotary_dim(hf, head_dim),
            moe=experts if num_dense_layers < num_layers else None,
        ),
    )
    _check(config)
    return config


def _check(config: LLaDA2Config) -> None:
    if config.norm_head and config.tie_word_embeddings:
        raise errors.ConfigError("config.json: norm_head needs tie_word_embeddings=false")
    hf_config.check_spec(config.spec)
    if config.num_dense_layers < config.spec.num_layers:
        _check_routing(config)


def _check_routing(config: LLaDA2Config) -> None:
    experts, groups, kept = config.num_experts, config.num_groups, config.kept_groups
    if experts % groups or (groups > 1 and experts // groups < 2) or kept > groups:
        raise errors.ConfigError(
            f"config.json: num_experts={experts} cannot form n_group={groups} groups of two or "
            f"more experts of which topk_group={kept} are kept"
        )
    reachable = experts * kept // groups if groups > 1 else experts
    if config.experts_per_token > reachable:
        raise errors.ConfigError(
            f"config.json: num_experts_per_tok={config.experts_per_token} exceeds the "
            f"{reachable} experts a token can reach"
        )


def _rotary_dim(hf: Mapping[str, Any], head_dim: int) -> int:
    rope = hf_config.rope_parameters(hf)
    factor = hf_config.first(hf.get("partial_rotary_factor"), rope.get("partial_rotary_factor"))
    explicit = hf.get("rotary_dim")
    if factor is None and explicit is None:
        raise errors.ConfigError("config.json: partial_rotary_factor (or rotary_dim) is missing")
    dim = explicit if factor is None else int(head_dim * factor)
    if explicit is not None and explicit != dim:
        raise errors.ConfigError(
            f"config.json: rotary_dim={explicit} disagrees with partial_rotary_factor={factor} "
            f"of head_dim={head_dim}"
        )
    if not 0 < dim <= head_dim or dim % 2:
        raise errors.ConfigError(
            f"config.json: rotary_dim={dim} must be even and at most {head_dim}"
        )
    return dim
