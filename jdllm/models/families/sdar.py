"""SDAR (1.7B, 4B, 8B), and what is trained from it, as TraDo: Qwen3's stack, block after block.

The forward pass is Qwen3's, with a norm for each head of q and k. A position sees all blocks up to
its own, and logit row i predicts position i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm.models import decoder_config, family, hf_config, key_rules, llama_names, table
from jdllm.spec import DiffusionSpec

# The published configs lack these: the block size of the models without a number of their own
# (-b8 to -b64 in the name of the others), <|MASK|>, <|endoftext|>.
DEFAULTS = DiffusionSpec(block_size=4, mask_token_id=151669, eos_token_ids=(151643,))

# Switches of the training program; they do not change the forward pass.
TRAINING_KEYS = key_rules.names(
    "debug ep_size fuse_cross_entropy micro_forward skip_checkpoint use_deepep"
)

RULES = key_rules.KeyRules(
    architecture="SDARForCausalLM",
    model_type="sdar",
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    neutral=key_rules.FOREIGN_NEUTRAL_TO_DENSE
    | {
        "attention_bias": False,
        # Its model class always has these norms.
        "use_qk_norm": True,
        "use_qk_layernorm": True,
        "qk_layernorm": True,
    },
    # `use_sliding_window` turns this window off.
    harmless=key_rules.names("sliding_window max_window_layers") | TRAINING_KEYS,
)


def _read(hf: Mapping[str, Any], diffusion: DiffusionSpec) -> decoder_config.DecoderConfig:
    head_dim = hf_config.head_dim(hf, RULES.sizes)
    spec = decoder_config.read_spec(hf, RULES, diffusion, head_dim=head_dim)
    attention = decoder_config.read_attention(hf, spec, has_qk_norm=True)
    return decoder_config.read_dense(hf, RULES, spec, attention)


FAMILY = family.Family(
    rules=RULES,
    defaults=DEFAULTS,
    read=_read,
    weights=table.WeightTable(
        layers="model.layers",
        rows=llama_names.STACK + llama_names.QK_NORMS + llama_names.DENSE,
    ),
    end_of_turn="<|im_end|>",
    example={},
)
