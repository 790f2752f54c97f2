"""The HF architectures that this engine loads: one readable dict, no discovery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.models.families import (
    diffusion_gemma,
    dream,
    fast_dllm_v2,
    llada,
    llada2,
    llada_moe,
    nemotron_labs_diffusion,
    sdar,
    sdar_moe,
    stable_diffcoder,
)
from jdllm.models.family import Family

FAMILIES: dict[str, Family] = {
    "LLaDA2MoeModelLM": llada2.FAMILY,
    "LLaDAModelLM": llada.FAMILY,
    "LLaDAMoEModelLM": llada_moe.FAMILY,
    "DreamModel": dream.FAMILY,
    "SDARForCausalLM": sdar.FAMILY,
    "SDARMoeForCausalLM": sdar_moe.FAMILY,
    "StableDiffcoderForCausalLM": stable_diffcoder.FAMILY,
    "DiffusionGemmaForBlockDiffusion": diffusion_gemma.FAMILY,
    "Fast_dLLM_QwenForCausalLM": fast_dllm_v2.FAMILY,
    "NemotronLabsDiffusionModel": nemotron_labs_diffusion.FAMILY,
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
            f"config.json: architectures names no model class; supported: {', '.join(FAMILIES)}"
        )
    names = [name for name in names if isinstance(name, str)]
    if not any(name in FAMILIES for name in names):
        raise errors.ConfigError(
            f"config.json: architectures={errors.quote(names)} is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    return next(name for name in names if name in FAMILIES)
