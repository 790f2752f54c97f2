"""LLaDA2's HF config.json as one frozen dataclass, every key decided once.

A key whose value this engine does not implement is an error that names it; the
few LLaDA2 facts that published configs leave out come from constants here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models import spec as spec_lib

ARCHITECTURE = "LLaDA2MoeModelLM"

# Not in the published configs: <|mask|>, <|endoftext|> and the training block.
DEFAULT_MASK_TOKEN_ID = 156895
DEFAULT_EOS_TOKEN_ID = 156892
DEFAULT_BLOCK_SIZE = 32

# key: the values this engine implements, the first one meant by a missing key.
_ONLY: dict[str, tuple[Any, ...]] = {
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
    "rope_scaling": (None,),
    "expert_capacity": (None,),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LLaDA2Config:
    """Sizes and constants of one LLaDA2 model; `num_groups` 1 means no group limit."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_groups: int
    kept_groups: int
    num_dense_layers: int
    routed_scaling_factor: float
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    norm_head: bool
    spec: spec_lib.ModelSpec

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
    for key, allowed in _ONLY.items():
        if hf.get(key, allowed[0]) not in allowed:
            raise errors.ConfigError(
                f"config.json: {key}={hf[key]!r} is not supported for {ARCHITECTURE}; "
                f"supported: {' or '.join(map(repr, allowed))}"
            )
    heads = _integer(hf, "num_attention_heads")
    hidden = _integer(hf, "hidden_size")
    head_dim = _integer(hf, "head_dim", default=hidden // heads)
    width = _integer(hf, "moe_intermediate_size")
    shared_width = width * _integer(hf, "num_shared_experts", default=0, low=0)
    if shared_width:
        shared_width = _integer(hf, "moe_shared_expert_intermediate_size", default=shared_width)
    config = LLaDA2Config(
        hidden_size=hidden,
        intermediate_size=_integer(hf, "intermediate_size"),
        moe_intermediate_size=width,
        shared_intermediate_size=shared_width,
        num_experts=_integer(hf, "num_experts"),
        experts_per_token=_integer(hf, "num_experts_per_tok"),
        num_groups=_integer(hf, "n_group", default=1),
        kept_groups=_integer(hf, "topk_group", default=1),
        num_dense_layers=_integer(hf, "first_k_dense_replace", default=0, low=0),
        routed_scaling_factor=_number(hf, "routed_scaling_factor"),
        rotary_dim=_rotary_dim(hf, head_dim),
        rope_theta=_rope_theta(hf),
        rms_norm_eps=_number(hf, "rms_norm_eps"),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        norm_head=bool(hf.get("norm_head", False)),
        spec=spec_lib.ModelSpec(
            architecture=ARCHITECTURE,
            model_type=hf.get("model_type", "llada2_moe"),
            vocab_size=_integer(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=_integer(hf, "num_hidden_layers"),
            num_query_heads=heads,
            num_kv_heads=_integer(hf, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            max_position_embeddings=_integer(hf, "max_position_embeddings"),
            diffusion=_diffusion(hf, generation_config or {}, block_size),
        ),
    )
    _check(config)
    return config


def _diffusion(
    hf: Mapping[str, Any], generation: Mapping[str, Any], block_size: int | None
) -> spec_lib.DiffusionSpec:
    blocks = {hf[key] for key in ("block_size", "block_length") if hf.get(key) is not None}
    if block_size is None and len(blocks) > 1:
        raise errors.ConfigError(
            f"config.json: block_size={hf['block_size']!r} and "
            f"block_length={hf['block_length']!r} disagree; pass a block size"
        )
    if block_size is None:
        block_size = blocks.pop() if blocks else DEFAULT_BLOCK_SIZE
    mask = _first(hf.get("mask_token_id"), generation.get("mask_token_id"), DEFAULT_MASK_TOKEN_ID)
    eos = _first(generation.get("eos_token_id"), hf.get("eos_token_id"), DEFAULT_EOS_TOKEN_ID)
    return spec_lib.DiffusionSpec(
        block_size=_integer({"block_size": block_size}, "block_size"),
        mask_token_id=mask,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _check(config: LLaDA2Config) -> None:
    model, diffusion = config.spec, config.spec.diffusion
    if config.norm_head and config.tie_word_embeddings:
        raise errors.ConfigError("config.json: norm_head needs tie_word_embeddings=false")
    named = [("mask_token_id", diffusion.mask_token_id)]
    named += [("eos_token_id", i) for i in diffusion.eos_token_ids]
    for key, token_id in named:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id < model.vocab_size:
            raise errors.ConfigError(
                f"{key}={token_id!r} is outside the vocabulary of {model.vocab_size} tokens; "
                f"set {key} in config.json"
            )
    if model.num_query_heads % model.num_kv_heads:
        raise errors.ConfigError(
            f"config.json: num_attention_heads={model.num_query_heads} is no multiple of "
            f"num_key_value_heads={model.num_kv_heads}"
        )
    if config.num_dense_layers < model.num_layers:
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
    rope = hf.get("rope_parameters") or {}
    factor = _first(hf.get("partial_rotary_factor"), rope.get("partial_rotary_factor"))
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


def _rope_theta(hf: Mapping[str, Any]) -> float:
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise errors.ConfigError(
            f"config.json: rope_parameters.rope_type={rope['rope_type']!r} is not supported; "
            "supported: 'default'"
        )
    return _number(
        {"rope_theta": _first(hf.get("rope_theta"), rope.get("rope_theta"))}, "rope_theta"
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _integer(hf: Mapping[str, Any], key: str, *, default: int | None = None, low: int = 1) -> int:
    value = _first(hf.get(key), default)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be an integer >= {low}")
    return value


def _number(hf: Mapping[str, Any], key: str) -> float:
    value = hf.get(key)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be a number > 0")
    return float(value)
