"""LLaDA2's HF config.json as one frozen dataclass, every key decided once.

A key whose value this engine does not implement is an error that names it, a key
that nobody decided about is named in a warning; the few LLaDA2 facts that published
configs leave out come from constants here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models import spec as spec_lib

logger = logging.getLogger(__name__)

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

# Keys of other families that change the forward pass: the value that does not, or null.
_NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "add_bias_linear": False,
    "use_rmsnorm": True,
    "use_qk_layernorm": True,
    "qk_layernorm": True,
    "zero_centered_gamma": False,
    "rope_interleave": False,
    "rope_interleaved": False,
    "use_rope": True,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "no_rope_layers": [],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    # Scales: 1 is none.
    "scale_emb": 1,
    "scale_depth": 1,
    "embedding_scale": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "lm_head_multiplier": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
    # Scales, caps and formats that only null leaves out.
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "logit_softcap": None,
    "logits_soft_cap": None,
    "final_logit_softcap": None,
    "final_logit_softcapping": None,
    "attn_logit_softcap": None,
    "attn_logit_softcapping": None,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "compression_config": None,
}

# Keys that `parse_config` reads, besides `_ONLY`.
_READ = frozenset(
    """
    block_length block_size eos_token_id first_k_dense_replace head_dim hidden_size
    intermediate_size layer_types mask_token_id max_position_embeddings model_type
    moe_intermediate_size moe_shared_expert_intermediate_size n_group norm_head
    num_attention_heads num_experts num_experts_per_tok num_hidden_layers
    num_key_value_heads num_shared_experts partial_rotary_factor rms_norm_eps
    rope_parameters rope_theta rotary_dim routed_scaling_factor tie_word_embeddings
    topk_group vocab_size
    """.split()  # noqa: SIM905
)

# Keys that say nothing about the forward pass: bookkeeping of transformers, other
# special tokens, training, generation defaults of old configs, and the window that
# `use_sliding_window` turns off.
_HARMLESS = frozenset(
    """
    architectures auto_map dtype torch_dtype transformers_version tokenizer_class
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal attn_implementation use_cache use_bfloat16
    torchscript return_dict output_attentions output_hidden_states output_router_logits
    chunk_size_feed_forward pruned_heads finetuning_task problem_type id2label label2id
    num_labels task_specific_params tie_encoder_decoder cross_attention_hidden_size
    tf_legacy_loss pretraining_tp prefix
    bos_token_id pad_token_id sep_token_id unk_token_id image_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id
    attention_dropout embedding_dropout hidden_dropout output_dropout attn_pdrop
    embd_pdrop resid_pdrop initializer_range router_aux_loss_coef aux_loss_alpha seq_aux
    router_z_loss_coef mtp_loss_scaling_factor moe_router_bias_update_rate
    sliding_window max_window_layers
    max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905
)
_ROPE_PARAMETERS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})


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
    _check_values(hf)
    _warn_of_unknown_keys(hf)
    heads = _integer(hf, "num_attention_heads")
    hidden = _integer(hf, "hidden_size")
    head_dim = _integer(hf, "head_dim", default=hidden // heads)
    width = _integer(hf, "moe_intermediate_size")
    shared_width = width * _integer(hf, "num_shared_experts", default=0, low=0)
    if shared_width:
        shared_width = _integer(hf, "moe_shared_expert_intermediate_size", default=shared_width)
    rotary_dim = _rotary_dim(hf, head_dim)
    num_layers = _integer(hf, "num_hidden_layers")
    num_dense_layers = _integer(hf, "first_k_dense_replace", default=0, low=0)
    experts = spec_lib.MoESpec(
        num_experts=_integer(hf, "num_experts"),
        experts_per_token=_integer(hf, "num_experts_per_tok"),
        num_groups=_integer(hf, "n_group", default=1),
        intermediate_size=width,
    )
    config = LLaDA2Config(
        hidden_size=hidden,
        intermediate_size=_integer(hf, "intermediate_size"),
        moe_intermediate_size=width,
        shared_intermediate_size=shared_width,
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        num_groups=experts.num_groups,
        kept_groups=_integer(hf, "topk_group", default=1),
        num_dense_layers=num_dense_layers,
        routed_scaling_factor=_number(hf, "routed_scaling_factor"),
        rotary_dim=rotary_dim,
        rope_theta=_rope_theta(hf),
        rms_norm_eps=_number(hf, "rms_norm_eps"),
        tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        norm_head=_flag(hf, "norm_head"),
        spec=spec_lib.ModelSpec(
            architecture=ARCHITECTURE,
            model_type=hf.get("model_type", "llada2_moe"),
            vocab_size=_integer(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=num_layers,
            num_query_heads=heads,
            num_kv_heads=_integer(hf, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            max_position_embeddings=_integer(hf, "max_position_embeddings"),
            diffusion=_diffusion(hf, generation_config or {}, block_size),
            rotary_dim=rotary_dim,
            moe=experts if num_dense_layers < num_layers else None,
        ),
    )
    _check(config)
    return config


def _check_values(hf: Mapping[str, Any]) -> None:
    for key, allowed in _ONLY.items():
        if hf.get(key, allowed[0]) not in allowed:
            _refuse(key, hf[key], " or ".join(map(repr, allowed)))
    for key, neutral in _NEUTRAL.items():
        if hf.get(key) not in (None, neutral):
            _refuse(key, hf[key], repr(neutral))
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        _refuse("layer_types", hf["layer_types"], "'full_attention' in every layer")
    rope = _rope_parameters(hf)
    for key in ("rope_type", "type"):
        if rope.get(key, "default") != "default":
            _refuse(f"rope_parameters.{key}", rope[key], "'default'")


def _refuse(key: str, value: Any, supported: str) -> None:
    raise errors.ConfigError(
        f"config.json: {key}={value!r} is not supported for {ARCHITECTURE}; supported: {supported}"
    )


def _warn_of_unknown_keys(hf: Mapping[str, Any]) -> None:
    # Only a warning: published configs may carry more harmless keys than we know.
    known = {*_ONLY, *_NEUTRAL, *_READ, *_HARMLESS}
    unknown = {key: value for key, value in hf.items() if key not in known}
    unknown |= {
        f"rope_parameters.{key}": value
        for key, value in _rope_parameters(hf).items()
        if key not in _ROPE_PARAMETERS
    }
    named = [f"{key}={value!r}" for key, value in unknown.items() if value is not None]
    if named:
        logger.warning("config.json: unknown keys without effect here: %s", ", ".join(named))


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
    rope = _rope_parameters(hf)
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
    rope = _rope_parameters(hf)
    return _number(
        {"rope_theta": _first(hf.get("rope_theta"), rope.get("rope_theta"))}, "rope_theta"
    )


def _rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    value = hf.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise errors.ConfigError(f"config.json: rope_parameters={value!r} must be an object")
    return value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _integer(hf: Mapping[str, Any], key: str, *, default: int | None = None, low: int = 1) -> int:
    value = _first(hf.get(key), default)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be an integer >= {low}")
    return value


def _flag(hf: Mapping[str, Any], key: str) -> bool:
    value = _first(hf.get(key), False)
    if not isinstance(value, bool):
        raise errors.ConfigError(f"config.json: {key}={value!r} must be true or false")
    return value


def _number(hf: Mapping[str, Any], key: str) -> float:
    value = hf.get(key)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be a number > 0")
    return float(value)
