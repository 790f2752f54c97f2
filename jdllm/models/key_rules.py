"""The rules of a family for each key of its HF config.json.

A value that this engine does not implement is an error that names the key. A warning names each
key that no rule knows. `hf_config` reads the values.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models import hf_config

logger = logging.getLogger(__name__)


def names(text: str) -> frozenset[str]:
    """Returns the words of a text, which are names of keys."""
    return frozenset(text.split())


# Keys of other families that change the forward pass, with the value that does not; null does not
# change it either.
FOREIGN_NEUTRAL: dict[str, Any] = {
    "mlp_bias": False,
    "add_bias_linear": False,
    "use_rmsnorm": True,
    "zero_centered_gamma": False,
    "rope_interleave": False,
    "rope_interleaved": False,
    "use_rope": True,
    "mlp_only_layers": [],
    "no_rope_layers": [],
    "num_nextn_predict_layers": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    # Scales: 1 means no scale.
    "scale_emb": 1,
    "scale_depth": 1,
    "embedding_scale": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "lm_head_multiplier": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
    # Scales, caps and formats: only null turns them off.
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
    "quantization_config": None,
    "rope_scaling": None,
}

# The same for families whose layers are all dense and have no norms of q and k.
FOREIGN_NEUTRAL_TO_DENSE: dict[str, Any] = FOREIGN_NEUTRAL | {
    "use_qk_norm": False,
    "use_qk_layernorm": False,
    "qk_layernorm": False,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "partial_rotary_factor": 1,
}

# Keys without effect on the forward pass: bookkeeping of transformers, other special tokens,
# training, generation defaults of old configs.
HARMLESS = names(
    """
    architectures auto_map dtype torch_dtype transformers_version tokenizer_class
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal attn_implementation use_cache use_bfloat16
    torchscript return_dict output_attentions output_hidden_states output_router_logits
    chunk_size_feed_forward pruned_heads finetuning_task problem_type id2label label2id
    num_labels task_specific_params tie_encoder_decoder cross_attention_hidden_size
    tf_legacy_loss pretraining_tp prefix
    bos_token_id sep_token_id unk_token_id image_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id
    attention_dropout embedding_dropout hidden_dropout output_dropout attn_pdrop
    embd_pdrop resid_pdrop initializer_range
    max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """
)

# Keys that this engine reads for every family, besides the keys of its sizes.
_READ = names(
    """
    eos_token_id head_dim layer_types mask_token_id model_type
    pad_token_id rms_norm_eps rope_parameters rope_theta vocab_size
    """
) | frozenset(hf_config.BLOCK_KEYS)
# Keys of `rope_parameters` that this engine reads for every family.
ROPE_PARAMETERS = names("rope_theta rope_type type partial_rotary_factor")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """The names of a family, and its rules for the keys of its config.json.

    `only`: the implemented values of a key; a missing key means the first one. `neutral`: the
    value that does not change the forward pass; null does not change it either. `read`: the keys
    that the family parses, besides its `sizes`. `harmless`: the keys without effect, besides
    `HARMLESS`. `missing`: the values that the published model class assumes for missing keys, if
    the releases have other values. `rope_types`: the implemented kinds of rotation; a missing key
    means the first one. `rope_read`: the keys of `rope_parameters` that the family parses.
    """

    architecture: str
    model_type: str
    only: Mapping[str, tuple[Any, ...]]
    neutral: Mapping[str, Any]
    sizes: hf_config.SizeKeys = hf_config.SizeKeys()
    read: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    missing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layer_types: tuple[str, ...] = ("full_attention",)
    rope_types: tuple[str, ...] = ("default",)
    rope_read: frozenset[str] = frozenset()

    def check(self, hf: Mapping[str, Any]) -> None:
        """Raises for the first value that is not implemented; otherwise warns of unknown keys."""
        for key, allowed in self.only.items():
            if hf.get(key, allowed[0]) not in allowed:
                self.refuse(key, hf[key], " or ".join(map(repr, allowed)))
        for key, neutral in self.neutral.items():
            if hf.get(key) not in (None, neutral):
                self.refuse(key, hf[key], repr(neutral))
        kinds = hf.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind not in self.layer_types for kind in kinds):
            kinds = " or ".join(map(repr, self.layer_types))
            self.refuse("layer_types", hf["layer_types"], f"{kinds} in every layer")
        rope = hf_config.rope_parameters(hf)
        for key in ("rope_type", "type"):
            if rope.get(key, self.rope_types[0]) not in self.rope_types:
                kinds = " or ".join(map(repr, self.rope_types))
                self.refuse(f"rope_parameters.{key}", rope[key], kinds)
        whole = self.neutral.get("partial_rotary_factor")
        factor = rope.get("partial_rotary_factor")
        if whole is not None and factor not in (None, whole):
            self.refuse("rope_parameters.partial_rotary_factor", factor, repr(whole))
        self._warn_of_unknown_keys(hf)

    def refuse(self, key: str, value: Any, supported: str) -> None:
        """Raises the error for a value that is not implemented."""
        raise errors.ConfigError(
            f"config.json: {key}={errors.quote(value)} is not supported for {self.architecture}; "
            f"supported: {supported}"
        )

    def _warn_of_unknown_keys(self, hf: Mapping[str, Any]) -> None:
        # Only a warning: published configs may have harmless keys that no rule knows.
        known = {*self.only, *self.neutral, *self.read, *self.harmless, *_READ, *HARMLESS}
        known.update(dataclasses.astuple(self.sizes))
        unknown = {key: value for key, value in hf.items() if key not in known}
        unknown |= {
            f"rope_parameters.{key}": value
            for key, value in hf_config.rope_parameters(hf).items()
            if key not in ROPE_PARAMETERS | self.rope_read
        }
        named = [
            f"{key}={errors.quote(value)}" for key, value in unknown.items() if value is not None
        ]
        if named:
            logger.warning("config.json: unknown keys without effect here: %s", ", ".join(named))
