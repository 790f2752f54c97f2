"""LLaDA-8B (Base, Instruct), LLaDA-1.5 and d3LLM-LLaDA: Llama's stack without a mask, OLMo's keys.

This engine implements the values that all releases share. Grouped queries, a bias on q, k and v,
and a tied head are allowed as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models import decoder_config, family, hf_config, key_rules, table
from jdllm.spec import AttentionPattern, DiffusionSpec, LogitAlignment

# The defaults for configs without these facts: <|mdm_mask|> and <|endoftext|> of the published
# tokenizer. The sampler may choose any block size; the published evaluations use 32.
DEFAULTS = DiffusionSpec(
    block_size=32,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    attention_pattern=AttentionPattern.FULL,
    logit_alignment=LogitAlignment.SAME_POSITION,
)

RULES = key_rules.KeyRules(
    architecture="LLaDAModelLM",
    model_type="llada",
    sizes=hf_config.SizeKeys(
        hidden_size="d_model",
        intermediate_size="mlp_hidden_size",
        num_layers="n_layers",
        num_query_heads="n_heads",
        num_kv_heads="n_kv_heads",
        max_position_embeddings="max_sequence_length",
        tie_word_embeddings="weight_tying",
    ),
    only={
        "block_type": ("llama",),
        "block_group_size": (1,),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "bias_for_layer_norm": (False, None),  # null means include_bias
        "attention_layer_norm": (False,),
        "activation_type": ("silu",),
        "include_bias": (False,),
        "rope": (True,),
        "rope_full_precision": (True,),
        "alibi": (False,),
        "input_emb_norm": (False,),
        "scale_logits": (False,),
    },
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE
    | {
        "attention_bias": False,
        "multi_query_attention": False,  # a key of older configs; n_kv_heads replaces it
        "use_sliding_window": False,
        "sliding_window": None,
    },
    read=key_rules.names("embedding_size include_qkv_bias mlp_ratio"),
    # Keys of initialisation and training, and of features that values above turn off. The model
    # class reads `weight_tying` and ignores `tie_word_embeddings`.
    harmless=key_rules.names(
        """
        init_cutoff_factor init_device init_fn init_std precision residual_dropout
        train_max_sequence_length flash_attention alibi_bias_max
        attention_layer_norm_with_affine tie_word_embeddings
        """
    ),
    # The defaults of ModelConfig in configuration_llada.py are those of GPT-2.
    missing={
        "block_type": "sequential",
        "layer_norm_type": "default",
        "activation_type": "swiglu",
        "rope": False,
        "weight_tying": True,
        "mlp_ratio": 4,
    },
)

# The LM head and the down projections are both called ff_out.
WEIGHTS = table.WeightTable(
    layers="model.transformer.blocks",
    rows="""
    model.transformer.wte.weight      word_embeddings
    model.transformer.ln_f.weight     norm.weight
    model.transformer.ff_out.weight   lm_head
    {layer}.attn_norm.weight          {layer}.input_layernorm.weight
    {layer}.q_proj.weight             {layer}.attention.w_qkv[q]
    {layer}.k_proj.weight             {layer}.attention.w_qkv[k]
    {layer}.v_proj.weight             {layer}.attention.w_qkv[v]
    {layer}.q_proj.bias               {layer}.attention.b_qkv[q]
    {layer}.k_proj.bias               {layer}.attention.b_qkv[k]
    {layer}.v_proj.bias               {layer}.attention.b_qkv[v]
    {layer}.attn_out.weight           {layer}.attention.w_out
    {layer}.ff_norm.weight            {layer}.post_attention_layernorm.weight
    {layer}.ff_proj.weight            {layer}.mlp.w_gate_up[gate]
    {layer}.up_proj.weight            {layer}.mlp.w_gate_up[up]
    {layer}.ff_out.weight             {layer}.mlp.w_down
    """,
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.shared_head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    if hf_config.integer(hf, "embedding_size", default=spec.vocab_size) != spec.vocab_size:
        raise errors.ConfigError(
            f"config.json: embedding_size={hf['embedding_size']} must be "
            f"vocab_size={spec.vocab_size}"
        )
    if hf.get("mlp_hidden_size") is None:
        hf = {**hf, "mlp_hidden_size": spec.hidden_size * hf_config.integer(hf, "mlp_ratio")}
    attention = decoder_config.read_attention(
        hf, spec, has_qkv_bias=hf_config.flag(hf, "include_qkv_bias")
    )
    return decoder_config.read_dense(hf, RULES, spec, attention)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=WEIGHTS,
    end_of_turn="<|eot_id|>",
    example={
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "include_qkv_bias": True,
    },
)
