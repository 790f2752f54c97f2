"""Stable-DiffCoder-8B (Instruct, Base): Llama's stack, block after block.

A position sees all blocks up to its own, and logit row i predicts position i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.spec import DiffusionSpec

# The published sampler has the block size and the mask as defaults of its arguments.
DEFAULTS = DiffusionSpec(block_size=4, mask_token_id=5, eos_token_ids=(2,))

RULES = key_rules.KeyRules(
    architecture="StableDiffcoderForCausalLM",
    model_type="llama",
    only={"hidden_act": ("silu",)},
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE
    | {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    attention = decoder_config.read_attention(hf, spec)
    return decoder_config.read_dense(hf, RULES, spec, attention)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=table.WeightTable(layers="model.layers", rows=llama_names.STACK + llama_names.DENSE),
    end_of_turn=None,
    example={},
)
