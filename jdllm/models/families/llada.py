"""The config.json of LLaDA-8B (Base, Instruct), LLaDA-1.5 and d3LLM-LLaDA: OLMo's keys.

See `hf_config`. The values that every release has are the ones that are implemented;
grouped queries, a bias on q, k and v and a tied head are legal as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm import spec as spec_lib
from jdllm.models import decoder_config, hf_config

ARCHITECTURE = "LLaDAModelLM"

# For configs without them: <|mdm_mask|> and <|endoftext|> of the published tokenizer. The block
# is a choice of the sampler; 32 is that of the published evaluations.
DEFAULTS = spec_lib.DiffusionSpec(
    block_size=32,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    attention_pattern=spec_lib.AttentionPattern.FULL,
    logit_alignment=spec_lib.LogitAlignment.SAME_POSITION,
)

# What the published model class (ModelConfig of configuration_llada.py, GPT-2's values) takes a
# missing key to mean, where the releases say otherwise.
_MISSING = {
    "block_type": "sequential",
    "layer_norm_type": "default",
    "activation_type": "swiglu",
    "rope": False,
    "weight_tying": True,
    "mlp_ratio": 4,
}

_RULES = hf_config.KeyRules(
    architecture=ARCHITECTURE,
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
    neutral=hf_config.FOREIGN_NEUTRAL_TO_DENSE
    | {
        "attention_bias": False,
        "multi_query_attention": False,  # of older configs; n_kv_heads says it
        "use_sliding_window": False,
        "sliding_window": None,
    },
    read=frozenset(
        """
        d_model embedding_size head_dim include_qkv_bias max_sequence_length
        mlp_hidden_size mlp_ratio n_heads n_kv_heads n_layers rms_norm_eps rope_theta
        vocab_size weight_tying
        """.split()  # noqa: SIM905
    ),
    # Initialisation and training; what values above turn off; the model class obeys
    # `weight_tying` and not its namesake.
    harmless=frozenset(
        """
        init_cutoff_factor init_device init_fn init_std precision residual_dropout
        train_max_sequence_length flash_attention alibi_bias_max
        attention_layer_norm_with_affine tie_word_embeddings
        """.split()  # noqa: SIM905
    ),
)


def parse_config(
    hf: Mapping[str, Any],
    *,
    block_size: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> decoder_config.DenseConfig:
    """Returns the config of a LLaDA `config.json`; `block_size` overrides the model's own."""
    hf = {**_MISSING, **hf}
    _RULES.check(hf)
    dim = hf_config.integer(hf, "d_model")
    mlp_width = dim * hf_config.integer(hf, "mlp_ratio")
    heads = hf_config.integer(hf, "n_heads")
    head_dim = hf_config.head_dim_of(hf, dim_key="d_model", heads_key="n_heads")
    model = spec_lib.ModelSpec(
        architecture=ARCHITECTURE,
        model_type=hf.get("model_type", "llada"),
        vocab_size=_vocab_size(hf),
        hidden_size=dim,
        num_layers=hf_config.integer(hf, "n_layers"),
        num_query_heads=heads,
        num_kv_heads=hf_config.integer(hf, "n_kv_heads", default=heads),
        head_dim=head_dim,
        max_position_embeddings=hf_config.integer(hf, "max_sequence_length"),
        diffusion=hf_config.diffusion(hf, generation_config, block_size, DEFAULTS),
        rotary_dim=head_dim,
    )
    hf_config.check_spec(model, heads_key="n_heads", kv_heads_key="n_kv_heads")
    return decoder_config.DenseConfig(
        spec=model,
        intermediate_size=hf_config.integer(hf, "mlp_hidden_size", default=mlp_width),
        has_qkv_bias=hf_config.flag(hf, "include_qkv_bias"),
        rope_theta=hf_config.rope_theta(hf),
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=hf_config.flag(hf, "weight_tying"),
    )


def _vocab_size(hf: Mapping[str, Any]) -> int:
    size = hf_config.integer(hf, "vocab_size")
    if hf_config.integer(hf, "embedding_size", default=size) != size:
        raise errors.ConfigError(
            f"config.json: embedding_size={hf['embedding_size']} must be vocab_size={size}"
        )
    return size
