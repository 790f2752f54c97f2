"""Which HF architectures this engine loads: one readable dict, no discovery."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jdllm import errors
from jdllm.checkpoint import weight_table
from jdllm.models import (
    dense,
    dense_weights,
    llada2_weights,
)
from jdllm.models import llada2 as llada2_module
from jdllm.models.families import dream, llada, llada2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's parts: config parser, module, weight table and its last step, `prepare`."""

    parse_config: Callable[..., Any]
    build: Callable[..., nnx.Module]
    weight_rows: Callable[[Any], tuple[weight_table.WeightRow, ...]]
    prepare: Callable[[Any, Mapping[str, Any]], dict[str, Any]]


FAMILIES: dict[str, Family] = {
    "LLaDA2MoeModelLM": Family(
        parse_config=llada2.parse_config,
        build=llada2_module.LLaDA2,
        weight_rows=llada2_weights.weight_rows,
        prepare=llada2_weights.prepare,
    ),
    "LLaDAModelLM": Family(
        parse_config=llada.parse_config,
        build=dense.DenseDecoder,
        weight_rows=dense_weights.llada_rows,
        prepare=dense_weights.prepare,
    ),
    "DreamModel": Family(
        parse_config=dream.parse_config,
        build=dense.DenseDecoder,
        weight_rows=dense_weights.dream_rows,
        prepare=dense_weights.prepare,
    ),
}


def family(architecture: str) -> Family:
    """Returns the family of an HF architecture name."""
    if architecture not in FAMILIES:
        raise errors.ConfigError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """Returns the supported architecture that a config.json names."""
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise errors.ConfigError(
            f"config.json names no architecture; supported: {', '.join(FAMILIES)}"
        )
    if not any(name in FAMILIES for name in names):
        raise errors.ConfigError(
            f"architectures={names!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return next(name for name in names if name in FAMILIES)
