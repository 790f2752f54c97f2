"""DiffusionGemma (26B-A4B): Gemma 4's text model, which denoises canvases of random tokens.

There is no mask token. The context is encoded causally; a canvas of `canvas_length` tokens sees the
context and the whole of itself, and logit row i predicts position i. Five of six layers see only
the `sliding_window` nearest tokens of the context. The others have wider and fewer heads, and their
values are their keys before the norm. The vision tower of the checkpoints is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.layers import attention, mlp, moe, rope
from jdllm.models import (
    decoder_config,
    family,
    gemma_decoder,
    hf_config,
    key_rules,
    table,
)
from jdllm.spec import AttentionPattern, DiffusionSpec, KVHeads, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"

# The defaults for configs without these facts: <eos> and <turn|> of the published tokenizer.
DEFAULTS = DiffusionSpec(
    block_size=256,
    mask_token_id=None,
    eos_token_ids=(1, 106),
    attention_pattern=AttentionPattern.CAUSAL,
)

# What a layer's entry in `rope_parameters` and in `per_layer_config` may hold.
_ROPE_KEYS = key_rules.names("rope_type rope_theta partial_rotary_factor")
_LAYER_KEYS = key_rules.names("head_dim num_key_value_heads")
_ROPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}

RULES = key_rules.KeyRules(
    architecture="DiffusionGemmaForBlockDiffusion",
    model_type="diffusion_gemma",
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "tie_word_embeddings": (True,),
        # Tokens of images see one another; those of text never do.
        "use_bidirectional_attention": ("vision", None),
    },
    neutral={
        key: value
        for key, value in key_rules.FOREIGN_NEUTRAL.items()
        if key != "final_logit_softcapping"
    }
    | {
        "mask_token_id": None,
        "rope_theta": None,  # each kind of layer has its own
        "use_sliding_window": True,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "num_shared_experts": 0,
        "expert_capacity": None,
    },
    read=key_rules.names(
        """
        final_logit_softcapping global_head_dim layer_rope_parameters moe_intermediate_size
        num_experts num_global_key_value_heads per_layer_config sliding_window top_k_experts
        """
    ),
    # Vision, and parts of Gemma 4 that keys above turn off.
    harmless=key_rules.names(
        """
        audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id
        image_token_id video_token_id vision_config vision_soft_tokens_per_image
        vocab_size_per_layer_input hidden_act
        """
    ),
    layer_types=(SLIDING, FULL),
)

WEIGHTS = table.WeightTable(
    layers="model.decoder.layers",
    rows="""
    model.decoder.embed_tokens.weight                 word_embeddings
    model.decoder.norm.weight                         norm.weight
    model.decoder.self_conditioning.pre_norm.weight   self_conditioning.pre_norm.weight
    model.decoder.self_conditioning.gate_proj.weight  self_conditioning.mlp.w_gate_up[gate]
    model.decoder.self_conditioning.up_proj.weight    self_conditioning.mlp.w_gate_up[up]
    model.decoder.self_conditioning.down_proj.weight  self_conditioning.mlp.w_down
    {layer}.input_layernorm.weight               {layer}.input_layernorm.weight
    {layer}.self_attn.q_proj.weight              {layer}.attention.w_qkv[q]
    {layer}.self_attn.k_proj.weight              {layer}.attention.w_qkv[k]
    {layer}.self_attn.v_proj.weight              {layer}.attention.w_qkv[v]
    {layer}.self_attn.q_proj.weight              {layer}.attention.w_qk[q]
    {layer}.self_attn.k_proj.weight              {layer}.attention.w_qk[k]
    {layer}.self_attn.q_norm.weight              {layer}.attention.query_layernorm.weight
    {layer}.self_attn.k_norm.weight              {layer}.attention.key_layernorm.weight
    {layer}.self_attn.o_proj.weight              {layer}.attention.w_out
    {layer}.post_attention_layernorm.weight      {layer}.attention_post_norm.weight
    {layer}.pre_feedforward_layernorm.weight     {layer}.mlp_pre_norm.weight
    {layer}.mlp.gate_proj.weight                 {layer}.mlp.w_gate_up[gate]
    {layer}.mlp.up_proj.weight                   {layer}.mlp.w_gate_up[up]
    {layer}.mlp.down_proj.weight                 {layer}.mlp.w_down
    {layer}.post_feedforward_layernorm_1.weight  {layer}.mlp_post_norm.weight
    {layer}.pre_feedforward_layernorm_2.weight   {layer}.moe.pre_norm.weight
    {layer}.router.proj.weight                   {layer}.moe.router.weight[transposed]
    {layer}.router.scale                         {layer}.moe.router.scale
    {layer}.router.per_expert_scale              {layer}.moe.router.per_expert_scale
    {layer}.experts.gate_up_proj                 {layer}.moe.experts.w_gate_up[moe_gate_up]
    {layer}.experts.down_proj                    {layer}.moe.experts.w_down
    {layer}.post_feedforward_layernorm_2.weight  {layer}.moe.post_norm.weight
    {layer}.post_feedforward_layernorm.weight    {layer}.feed_forward_post_norm.weight
    {layer}.layer_scalar                         {layer}.layer_scalar
    model.encoder.language_model.layers.{number}.layer_scalar   {layer}.encoder_scalar
    """,
    unused=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
)


def _flatten(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `text_config` beside those of the whole model.

    `rope_parameters`, which has an entry per kind of layer here, becomes `layer_rope_parameters`,
    and `canvas_length` the block length.
    """
    text = _object(hf, "text_config")
    flat = {key: value for key, value in hf.items() if key != "text_config"}
    for key, value in text.items():
        # The whole model's own: they may differ and are read there.
        if key in ("model_type", "architectures", "dtype", "transformers_version"):
            continue
        if value is not None and flat.get(key) not in (None, value):
            raise errors.ConfigError(
                f"config.json: {key}={errors.quote(flat[key])} and text_config.{key}="
                f"{errors.quote(value)} disagree"
            )
        flat.setdefault(key, value)
        flat[key] = value if flat[key] is None else flat[key]
    if "canvas_length" in flat:
        flat["block_length"] = flat.pop("canvas_length")
    if "rope_parameters" in flat:
        flat["layer_rope_parameters"] = flat.pop("rope_parameters")
    return flat


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> gemma_decoder.GemmaConfig:
    if diffusion.mask_token_id is not None:
        RULES.refuse("mask_token_id", diffusion.mask_token_id, "none, since the noise is uniform")
    depth = hf_config.depth(hf, RULES.sizes)
    kinds = hf.get("layer_types") or []
    if len(kinds) != depth:
        raise errors.ConfigError(
            f"config.json: layer_types has {len(kinds)} entries, but "
            f"{RULES.sizes.num_layers}={depth}"
        )
    experts = _experts(hf)
    spec = decoder_config.read_spec(
        hf, RULES, diffusion, head_dim=hf_config.head_dim(hf, RULES.sizes), experts=experts
    )
    heads = [_kv_heads(hf, spec, kind, i) for i, kind in enumerate(kinds)]
    ropes = _object(hf, "layer_rope_parameters")
    _refuse_unknown("rope_parameters", ropes, frozenset(_ROPE_DEFAULTS))
    layers = tuple(
        decoder_config.LayerConfig(
            attention=_attention(hf, spec, kind, own, ropes.get(kind) or _ROPE_DEFAULTS[kind]),
            feed_forward=experts,
            has_post_norms=True,
        )
        for kind, own in zip(kinds, heads, strict=True)
    )
    return gemma_decoder.GemmaConfig(
        spec=dataclasses.replace(spec, kv_heads_of_layers=tuple(heads)),
        layers=layers,
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=True,
        dense=mlp.MLPConfig(
            width=hf_config.integer(hf, RULES.sizes.intermediate_size), activation="gelu_tanh"
        ),
        logit_softcap=hf_config.number(hf, "final_logit_softcapping"),
    )


def _experts(hf: Mapping[str, Any]) -> moe.MoEConfig:
    router = moe.RouterConfig(
        num_experts=hf_config.integer(hf, "num_experts"),
        experts_per_token=hf_config.integer(hf, "top_k_experts"),
        scores="softmax",
        has_bias=False,
    )
    decoder_config.check_routing(router)
    width = hf_config.integer(hf, "moe_intermediate_size")
    return moe.MoEConfig(width=width, shared_width=0, router=router, activation="gelu_tanh")


def _kv_heads(hf: Mapping[str, Any], spec: ModelSpec, kind: str, layer: int) -> KVHeads:
    """Returns the heads of a layer: its entry in `per_layer_config`, or else those of its kind."""
    every = _object(hf, "per_layer_config")
    _refuse_unknown("per_layer_config", every, frozenset(map(str, range(spec.num_layers))))
    own = _object(every, str(layer), prefix="per_layer_config.")
    _refuse_unknown(f"per_layer_config.{layer}", own, _LAYER_KEYS)
    found = {}
    for key, global_key, default in (
        ("head_dim", "global_head_dim", spec.head_dim),
        ("num_key_value_heads", "num_global_key_value_heads", spec.num_kv_heads),
    ):
        of_kind = hf_config.integer(hf, global_key, default=default) if kind == FULL else default
        found[key] = hf_config.integer(own, key, default=of_kind)
        if hf.get(global_key) is not None and found[key] != of_kind:
            raise errors.ConfigError(
                f"config.json: per_layer_config.{layer}.{key}={found[key]} and "
                f"{global_key if kind == FULL else key}={of_kind} disagree"
            )
    heads = KVHeads(count=found["num_key_value_heads"], dim=found["head_dim"])
    if heads.dim % 2 or spec.num_query_heads % heads.count:
        raise errors.ConfigError(
            f"config.json: layer {layer} has {heads.count} kv heads of width {heads.dim}; the "
            f"number must divide {spec.num_query_heads} query heads, the width must be even"
        )
    return heads


def _attention(
    hf: Mapping[str, Any],
    spec: ModelSpec,
    kind: str,
    heads: KVHeads,
    rope_parameters: Mapping[str, Any],
) -> attention.AttentionConfig:
    return attention.AttentionConfig(
        dim=spec.hidden_size,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=heads.count,
        head_dim=heads.dim,
        rope=_rope(kind, heads.dim, rope_parameters),
        qk_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        window=hf_config.integer(hf, "sliding_window") if kind == SLIDING else None,
        scale=1.0,
        normalizes_v=True,
        shares_kv=kind == FULL,
    )


def _rope(kind: str, head_dim: int, parameters: Mapping[str, Any]) -> rope.RopeConfig:
    """Returns the rotation of a kind of layer; "proportional" leaves the slowest pairs alone."""
    place = f"rope_parameters.{kind}"
    _refuse_unknown(place, parameters, _ROPE_KEYS)
    theta = hf_config.number(parameters, "rope_theta")
    factor = parameters.get("partial_rotary_factor")
    match parameters.get("rope_type", "default"):
        case "default":
            if factor not in (None, 1):
                RULES.refuse(f"{place}.partial_rotary_factor", factor, "1 with rope_type='default'")
            return rope.RopeConfig(rotary_dim=head_dim, theta=theta)
        case "proportional":
            share = 1.0
            if factor is not None:
                share = hf_config.number(parameters, "partial_rotary_factor")
            if share > 1:
                RULES.refuse(f"{place}.partial_rotary_factor", factor, "a number up to 1")
            turning = int(share * head_dim // 2)
            return rope.RopeConfig(rotary_dim=head_dim, theta=theta, num_turning=turning)
        case other:
            RULES.refuse(f"{place}.rope_type", other, "'default' or 'proportional'")
            raise AssertionError("refused")


def _object(hf: Mapping[str, Any], key: str, *, prefix: str = "") -> Mapping[str, Any]:
    value = hf.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise errors.ConfigError(
            f"config.json: {prefix}{key}={errors.quote(value)} must be an object"
        )
    return value


def _refuse_unknown(place: str, values: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in values.items():
        if key not in known:
            RULES.refuse(f"{place}.{key}", value, f"the keys {', '.join(sorted(known))}")


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=WEIGHTS,
    end_of_turn="<turn|>",
    example={
        "rope_theta": None,
        "tie_word_embeddings": True,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 4,
        "global_head_dim": 8,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "final_logit_softcapping": 30.0,
    },
    build=gemma_decoder.GemmaDecoder,
    flatten=_flatten,
)
