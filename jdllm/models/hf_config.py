"""Reads a family's HF config.json: typed values, or an error that says which key is wrong.

`key_rules` checks first that the values are implemented.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.spec import DiffusionSpec, ModelSpec

LARGEST_SIZE = 2**31 - 1
# Names of the block size; Fast-dLLM v2 has the last one.
BLOCK_KEYS = ("block_size", "block_length", "bd_size")
# A bound far above all models: each layer is an object on the host.
LARGEST_DEPTH = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeKeys:
    """The keys of the sizes that every decoder has; most families have the same keys as Llama."""

    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    num_layers: str = "num_hidden_layers"
    num_query_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"
    max_position_embeddings: str = "max_position_embeddings"
    tie_word_embeddings: str = "tie_word_embeddings"


def diffusion(
    hf: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    block_size: int | None,
    defaults: DiffusionSpec,
) -> DiffusionSpec:
    """Returns `defaults`, updated from the checkpoint's files and the caller's block size."""
    generation = generation or {}
    if block_size is None:
        named = {key: integer(hf, key) for key in BLOCK_KEYS if hf.get(key) is not None}
        blocks = set(named.values())
        if len(blocks) > 1:
            raise errors.ConfigError(
                f"config.json: {' and '.join(f'{key}={size}' for key, size in named.items())} "
                "disagree; pass a block size"
            )
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
        # The pad token is better: the first end token in a list may be the end of a turn.
        end_of_text_id=eos[0] if pad is None or pad == mask else pad,
    )


def check_spec(model: ModelSpec, sizes: SizeKeys) -> None:
    """Raises if a special token is outside the vocabulary, or if the head counts do not fit."""
    named = []
    if model.diffusion.kind != "uniform":  # the kind without a mask token
        named.append(("mask_token_id", model.diffusion.mask_token_id))
    named += [("eos_token_id", i) for i in model.diffusion.eos_token_ids]
    if model.diffusion.kind == "canvas":
        named.append(("pad_token_id", model.diffusion.end_of_text_id))
    for key, token_id in named:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not (is_id and token_id in range(model.vocab_size)):
            raise errors.ConfigError(
                f"{key}={errors.quote(token_id)} is outside the vocabulary of "
                f"{model.vocab_size} tokens; set {key} in config.json or "
                "generation_config.json"
            )
    if model.num_query_heads % model.num_kv_heads:
        raise errors.ConfigError(
            f"config.json: {sizes.num_query_heads}={model.num_query_heads} is no multiple of "
            f"{sizes.num_kv_heads}={model.num_kv_heads}"
        )


def refuse_quantised(hf: Mapping[str, Any], advice: str = "") -> None:
    """Raises for the config of weights that a library has quantised; `advice` ends the message."""
    key = "quantization_config"
    found = hf.get(key)
    if found is not None:
        raise errors.ConfigError(
            f"config.json: {key}={errors.quote(found)}: the weights are quantised already, which "
            f"is not supported; use the checkpoint in 16 or 32 bits{advice}"
        )


def depth(hf: Mapping[str, Any], sizes: SizeKeys) -> int:
    """Returns the number of layers."""
    return integer(hf, sizes.num_layers, high=LARGEST_DEPTH)


def head_dim(hf: Mapping[str, Any], sizes: SizeKeys) -> int:
    """Returns the width of a head; without the key, the heads divide the hidden size."""
    hidden, heads = integer(hf, sizes.hidden_size), integer(hf, sizes.num_query_heads)
    width = integer(hf, "head_dim", default=hidden // heads)
    if width % 2:
        raise errors.ConfigError(f"config.json: head_dim={width} must be even")
    return width


def shared_head_dim(hf: Mapping[str, Any], sizes: SizeKeys) -> int:
    """Returns the width of a head, for families whose heads always divide the hidden size."""
    dim_key, heads_key = sizes.hidden_size, sizes.num_query_heads
    dim, heads = integer(hf, dim_key), integer(hf, heads_key)
    width, rest = divmod(dim, heads)
    if rest or width % 2:
        raise errors.ConfigError(
            f"config.json: {dim_key}={dim} must be {heads_key}={heads} heads of an even width"
        )
    if integer(hf, "head_dim", default=width) != width:
        raise errors.ConfigError(
            f"config.json: head_dim={hf['head_dim']} is not {dim_key}={dim} over "
            f"{heads_key}={heads}"
        )
    return width


def rotary_dim(hf: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many dims of a head RoPE rotates, for families whose config must say so."""
    rope = rope_parameters(hf)
    key, factor = "partial_rotary_factor", None
    if hf.get(key) is not None or rope.get(key) is not None:
        factor = number(rope if hf.get(key) is None else hf, key)
    explicit = None if hf.get("rotary_dim") is None else integer(hf, "rotary_dim")
    dim = explicit if factor is None else math.floor(head_dim * min(factor, 2.0))
    if dim is None:
        raise errors.ConfigError(f"config.json: {key} (or rotary_dim) is missing")
    if explicit is not None and explicit != dim:
        raise errors.ConfigError(
            f"config.json: rotary_dim={explicit} disagrees with partial_rotary_factor={factor} "
            f"of head_dim={head_dim}"
        )
    if not 0 < dim <= head_dim or dim % 2:
        raise errors.ConfigError(
            f"config.json: {'rotary_dim' if factor is None else key} makes rotary_dim={dim}, which "
            f"must be even and at most {head_dim}"
        )
    return dim


def rope_theta(hf: Mapping[str, Any]) -> float:
    """Returns the base of the rotary frequencies, which may be a key of `rope_parameters`."""
    value = first(hf.get("rope_theta"), rope_parameters(hf).get("rope_theta"))
    return number({"rope_theta": value}, "rope_theta")


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rotary options of transformers 5, or an empty mapping."""
    value = hf.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise errors.ConfigError(
            f"config.json: rope_parameters={errors.quote(value)} must be an object"
        )
    return value


def first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def integer(
    hf: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    low: int = 1,
    high: int = LARGEST_SIZE,
    file: str = "config.json",
) -> int:
    """Returns an integer from `low` to `high`; errors name the `file`."""
    value = first(hf.get(key), default)
    if value is None:
        raise errors.ConfigError(f"{file}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise errors.ConfigError(
            f"{file}: {key}={errors.quote(value)} must be an integer from {low} to {high}"
        )
    return value


def flag(hf: Mapping[str, Any], key: str, *, file: str = "config.json") -> bool:
    """Returns a boolean, or False if the key is missing."""
    value = first(hf.get(key), False)
    if not isinstance(value, bool):
        raise errors.ConfigError(f"{file}: {key}={errors.quote(value)} must be true or false")
    return value


def number(hf: Mapping[str, Any], key: str, *, file: str = "config.json") -> float:
    """Returns a positive and finite number."""
    value = hf.get(key)
    if value is None:
        raise errors.ConfigError(f"{file}: {key} is missing")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before the conversion: an integer may be too large for a float.
    if not is_number or not 0 < value <= sys.float_info.max:
        raise errors.ConfigError(f"{file}: {key}={errors.quote(value)} must be a finite number > 0")
    return float(value)
