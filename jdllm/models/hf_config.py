"""Reading a family's HF config.json so that every key is decided once.

A key whose value this engine does not implement is an error that names it, a key
that nobody decided about is named in a warning. A family says what it decided in
`KeyRules`; the readers below give typed values or say which key is wrong.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm import spec as spec_lib

logger = logging.getLogger(__name__)

# Keys of other families that change the forward pass: the value that does not, or null.
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
    "quantization_config": None,
    "rope_scaling": None,
}

# Of families whose layers are all dense, without norms of q and k.
FOREIGN_NEUTRAL_TO_DENSE: dict[str, Any] = FOREIGN_NEUTRAL | {
    "use_qk_norm": False,
    "use_qk_layernorm": False,
    "qk_layernorm": False,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "partial_rotary_factor": 1,
}

# Keys that say nothing about the forward pass: bookkeeping of transformers, other
# special tokens, training, generation defaults of old configs.
HARMLESS = frozenset(
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
    """.split()  # noqa: SIM905
)

# Keys that the readers below read for every family.
_READ = frozenset(
    """
    block_length block_size eos_token_id layer_types mask_token_id model_type pad_token_id
    rope_parameters
    """.split()  # noqa: SIM905
)
_ROPE_PARAMETERS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """What a family decided about each key of its config.json.

    `only` holds the values that are implemented, the first one meant by a missing key;
    `neutral` the value that leaves the forward pass alone, as null does; `read` are the keys
    that the family parses, `harmless` those without effect on it besides `HARMLESS`.
    """

    architecture: str
    only: Mapping[str, tuple[Any, ...]]
    neutral: Mapping[str, Any]
    read: frozenset[str]
    harmless: frozenset[str] = frozenset()

    def check(self, hf: Mapping[str, Any]) -> None:
        """Raises for the first value that is not implemented, then warns of unknown keys."""
        for key, allowed in self.only.items():
            if hf.get(key, allowed[0]) not in allowed:
                self.refuse(key, hf[key], " or ".join(map(repr, allowed)))
        for key, neutral in self.neutral.items():
            if hf.get(key) not in (None, neutral):
                self.refuse(key, hf[key], repr(neutral))
        if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
            self.refuse("layer_types", hf["layer_types"], "'full_attention' in every layer")
        rope = rope_parameters(hf)
        for key in ("rope_type", "type"):
            if rope.get(key, "default") != "default":
                self.refuse(f"rope_parameters.{key}", rope[key], "'default'")
        whole = self.neutral.get("partial_rotary_factor")
        factor = rope.get("partial_rotary_factor")
        if whole is not None and factor not in (None, whole):
            self.refuse("rope_parameters.partial_rotary_factor", factor, repr(whole))
        self._warn_of_unknown_keys(hf)

    def refuse(self, key: str, value: Any, supported: str) -> None:
        """Raises the error of a value that is not implemented."""
        raise errors.ConfigError(
            f"config.json: {key}={value!r} is not supported for {self.architecture}; "
            f"supported: {supported}"
        )

    def _warn_of_unknown_keys(self, hf: Mapping[str, Any]) -> None:
        # Only a warning: published configs may carry more harmless keys than we know.
        known = {*self.only, *self.neutral, *self.read, *self.harmless, *_READ, *HARMLESS}
        unknown = {key: value for key, value in hf.items() if key not in known}
        unknown |= {
            f"rope_parameters.{key}": value
            for key, value in rope_parameters(hf).items()
            if key not in _ROPE_PARAMETERS
        }
        named = [f"{key}={value!r}" for key, value in unknown.items() if value is not None]
        if named:
            logger.warning("config.json: unknown keys without effect here: %s", ", ".join(named))


def diffusion(
    hf: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    block_size: int | None,
    defaults: spec_lib.DiffusionSpec,
) -> spec_lib.DiffusionSpec:
    """Returns `defaults` with what the checkpoint's files say, and the caller's block size."""
    generation = generation or {}
    blocks = {hf[key] for key in ("block_size", "block_length") if hf.get(key) is not None}
    if block_size is None and len(blocks) > 1:
        raise errors.ConfigError(
            f"config.json: block_size={hf['block_size']!r} and "
            f"block_length={hf['block_length']!r} disagree; pass a block size"
        )
    if block_size is None:
        block_size = blocks.pop() if blocks else defaults.block_size
    mask = first(hf.get("mask_token_id"), generation.get("mask_token_id"), defaults.mask_token_id)
    eos = first(generation.get("eos_token_id"), hf.get("eos_token_id"), defaults.eos_token_ids)
    eos = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if not eos:
        raise errors.ConfigError("eos_token_id=[] (generation_config.json, config.json) is empty")
    pad = first(generation.get("pad_token_id"), hf.get("pad_token_id"))
    return dataclasses.replace(
        defaults,
        block_size=integer({"block_size": block_size}, "block_size"),
        mask_token_id=mask,
        eos_token_ids=eos,
        # What rows are padded with, and not the first of a list, which may be the end of a turn.
        end_of_text_id=eos[0] if pad is None or pad == mask else pad,
    )


def check_spec(
    model: spec_lib.ModelSpec,
    *,
    heads_key: str = "num_attention_heads",
    kv_heads_key: str = "num_key_value_heads",
) -> None:
    """Raises where the special tokens or the head counts of a model cannot be."""
    named = [("mask_token_id", model.diffusion.mask_token_id)]
    named += [("eos_token_id", i) for i in model.diffusion.eos_token_ids]
    if model.diffusion.has_canvas:
        named.append(("pad_token_id", model.diffusion.end_of_text_id))
    for key, token_id in named:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id < model.vocab_size:
            raise errors.ConfigError(
                f"{key}={token_id!r} is outside the vocabulary of {model.vocab_size} tokens; "
                f"set {key} in config.json"
            )
    if model.num_query_heads % model.num_kv_heads:
        raise errors.ConfigError(
            f"config.json: {heads_key}={model.num_query_heads} is no multiple of "
            f"{kv_heads_key}={model.num_kv_heads}"
        )


def head_dim_of(hf: Mapping[str, Any], *, dim_key: str, heads_key: str) -> int:
    """Returns the head width of a family whose heads divide the hidden size between them."""
    dim, heads = integer(hf, dim_key), integer(hf, heads_key)
    head_dim, rest = divmod(dim, heads)
    if rest or head_dim % 2:
        raise errors.ConfigError(
            f"config.json: {dim_key}={dim} must be {heads_key}={heads} heads of an even width"
        )
    if integer(hf, "head_dim", default=head_dim) != head_dim:
        raise errors.ConfigError(
            f"config.json: head_dim={hf['head_dim']} is not {dim_key}={dim} over "
            f"{heads_key}={heads}"
        )
    return head_dim


def rope_theta(hf: Mapping[str, Any]) -> float:
    """Returns the base of the rotary frequencies, which may sit in `rope_parameters`."""
    value = first(hf.get("rope_theta"), rope_parameters(hf).get("rope_theta"))
    return number({"rope_theta": value}, "rope_theta")


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rotary options of transformers 5, or none."""
    value = hf.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise errors.ConfigError(f"config.json: rope_parameters={value!r} must be an object")
    return value


def first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def integer(hf: Mapping[str, Any], key: str, *, default: int | None = None, low: int = 1) -> int:
    """Returns an integer of at least `low`."""
    value = first(hf.get(key), default)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be an integer >= {low}")
    return value


def flag(hf: Mapping[str, Any], key: str) -> bool:
    """Returns a boolean, False where the key is missing."""
    value = first(hf.get(key), False)
    if not isinstance(value, bool):
        raise errors.ConfigError(f"config.json: {key}={value!r} must be true or false")
    return value


def number(hf: Mapping[str, Any], key: str) -> float:
    """Returns a positive number."""
    value = hf.get(key)
    if value is None:
        raise errors.ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise errors.ConfigError(f"config.json: {key}={value!r} must be a number > 0")
    return float(value)
