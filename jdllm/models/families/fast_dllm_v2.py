"""Fast-dLLM v2 (1.5B, 7B): Qwen2.5's stack, block after block, with the logits of its origin.

The forward pass is Qwen2's, with a bias on q, k and v. A position sees all blocks up to its own.
Logit row i predicts position i + 1, so the last row of a block gives the first token of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.spec import DiffusionSpec, LogitAlignment

# The published configs name no mask; it is an argument of the published sampler.
DEFAULTS = DiffusionSpec(
    block_size=32,
    mask_token_id=151665,
    eos_token_ids=(151645,),
    logit_alignment=LogitAlignment.SHIFTED,
)

RULES = key_rules.KeyRules(
    architecture="Fast_dLLM_QwenForCausalLM",
    model_type="Fast_dLLM_Qwen",
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    # The model class always has a bias on q, k and v, whatever the config says.
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE | {"attention_bias": True},
    # `use_sliding_window` turns this window off. The last key is a switch of the training program,
    # spelt as the releases spell it.
    harmless=key_rules.names("sliding_window max_window_layers conplemenrary_mask"),
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    attention = decoder_config.read_attention(hf, spec, has_qkv_bias=True)
    return decoder_config.read_dense(hf, RULES, spec, attention)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=table.WeightTable(
        layers="model.layers",
        rows=llama_names.STACK + llama_names.QKV_BIASES + llama_names.DENSE,
    ),
    end_of_turn="<|im_end|>",
    example={},
)
