"""Dream-7B, Dream-Coder, DiffuCoder and d3LLM-Dream(-Coder): Qwen2's stack without a mask.

The forward pass is Qwen2's, with a bias on q, k and v, but every position sees the whole
sequence. Logit row i predicts position i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.spec import AttentionPattern, DiffusionSpec, LogitAlignment

# The defaults for configs without these facts: <|mask|> and <|endoftext|> of the published
# tokenizer. The sampler may choose any block size; the published evaluations use 32.
DEFAULTS = DiffusionSpec(
    block_size=32,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    attention_pattern=AttentionPattern.FULL,
    logit_alignment=LogitAlignment.SHIFTED,
)

RULES = key_rules.KeyRules(
    architecture="DreamModel",
    model_type="Dream",
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    # The model class always has a bias on q, k and v, whatever the config says.
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE | {"attention_bias": True},
    # `use_sliding_window` turns this window off.
    harmless=key_rules.names("sliding_window max_window_layers"),
)


WEIGHTS = table.WeightTable(
    layers="model.layers",
    rows=llama_names.STACK + llama_names.QKV_BIASES + llama_names.DENSE,
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.shared_head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    attention = decoder_config.read_attention(hf, spec, has_qkv_bias=True)
    return decoder_config.read_dense(hf, RULES, spec, attention)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=WEIGHTS,
    end_of_turn="<|im_end|>",
    example={},
)
