"""The config.json of Dream-7B, Dream-Coder, DiffuCoder and d3LLM-Dream(-Coder): Qwen2's keys.

See `hf_config`. The forward pass is Qwen2's, with a bias on q, k and v, but sees the whole
sequence; logit row i predicts position i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import spec as spec_lib
from jdllm.models import decoder_config, hf_config

ARCHITECTURE = "DreamModel"

# For configs without them: <|mask|> and <|endoftext|> of the published tokenizer. The block is a
# choice of the sampler; 32 is that of the published evaluations.
DEFAULTS = spec_lib.DiffusionSpec(
    block_size=32,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    attention_pattern=spec_lib.AttentionPattern.FULL,
    logit_alignment=spec_lib.LogitAlignment.SHIFTED,
)

_RULES = hf_config.KeyRules(
    architecture=ARCHITECTURE,
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    # The model class has the bias of q, k and v whatever the config says.
    neutral=hf_config.FOREIGN_NEUTRAL_TO_DENSE | {"attention_bias": True},
    read=frozenset(
        """
        head_dim hidden_size intermediate_size max_position_embeddings
        num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
        rope_theta tie_word_embeddings vocab_size
        """.split()  # noqa: SIM905
    ),
    # The window that `use_sliding_window` turns off.
    harmless=frozenset({"sliding_window", "max_window_layers"}),
)


def parse_config(
    hf: Mapping[str, Any],
    *,
    block_size: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> decoder_config.DenseConfig:
    """Returns the config of a Dream `config.json`; `block_size` overrides the model's own."""
    _RULES.check(hf)
    heads = hf_config.integer(hf, "num_attention_heads")
    head_dim = hf_config.head_dim_of(hf, dim_key="hidden_size", heads_key="num_attention_heads")
    model = spec_lib.ModelSpec(
        architecture=ARCHITECTURE,
        model_type=hf.get("model_type", "Dream"),
        vocab_size=hf_config.integer(hf, "vocab_size"),
        hidden_size=hf_config.integer(hf, "hidden_size"),
        num_layers=hf_config.integer(hf, "num_hidden_layers"),
        num_query_heads=heads,
        num_kv_heads=hf_config.integer(hf, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        max_position_embeddings=hf_config.integer(hf, "max_position_embeddings"),
        diffusion=hf_config.diffusion(hf, generation_config, block_size, DEFAULTS),
        rotary_dim=head_dim,
    )
    hf_config.check_spec(model)
    return decoder_config.DenseConfig(
        spec=model,
        intermediate_size=hf_config.integer(hf, "intermediate_size"),
        has_qkv_bias=True,
        rope_theta=hf_config.rope_theta(hf),
        rms_norm_eps=hf_config.number(hf, "rms_norm_eps"),
        tie_word_embeddings=hf_config.flag(hf, "tie_word_embeddings"),
    )
