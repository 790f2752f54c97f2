"""The `adapter_config.json` of an adapter that PEFT stored: what it adds to which linear layer.

A key that would change the result in a way that is not implemented is an error that names it. The
meaning of each key is that of PEFT's `LoraConfig`
(https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.layers import low_rank
from jdllm.models import hf_config, key_rules

_READ = key_rules.names(
    """
    peft_type r lora_alpha rank_pattern alpha_pattern use_rslora target_modules layers_to_transform
    bias layers_pattern init_lora_weights
    """
)
# Bookkeeping, options of training, and of initial values (see `_INITIAL_VALUES`).
_HARMLESS = key_rules.names(
    """
    auto_mapping base_model_name_or_path revision task_type inference_mode peft_version
    megatron_core lora_dropout qalora_group_size runtime_config loftq_config eva_config
    corda_config lora_ga_config
    """
)
# How the adapter was initialised; by the others the base weights were changed, too.
_INITIAL_VALUES = (None, True, False, "gaussian", "orthogonal", "eva")
_LAYERS_PATTERNS = (None, [], "", "layers", ["layers"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter says of the layers that it is for.

    `targets` end the paths of its modules, `layers` are the numbers of its layers, None for all.
    The patterns map the ends of paths to values that replace `rank` and `alpha`.
    """

    targets: tuple[str, ...]
    layers: frozenset[int] | None
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool

    def of_module(self, path: str, layer: int) -> low_rank.LowRankConfig | None:
        """Returns what is added to a linear layer, None if it is no target."""
        if self.layers is not None and layer not in self.layers:
            return None
        if not any(ends_path(target, path) for target in self.targets):
            return None
        rank = _of_path(self.rank_pattern, path, self.rank)
        alpha = _of_path(self.alpha_pattern, path, self.alpha)
        divisor = math.sqrt(rank) if self.is_rank_stabilised else rank
        return low_rank.LowRankConfig(rank=rank, scale=alpha / divisor)


def ends_path(name: str, path: str) -> bool:
    """Returns whether the last names of a dotted path are `name`."""
    return f".{path}".endswith(f".{name}")


def parse(found: Mapping[str, Any], file: str, num_layers: int) -> AdapterConfig:
    """Returns the parsed config; raises a ConfigError, which names `file` and key."""

    def refuse(key: str, supported: str) -> None:
        raise errors.ConfigError(
            f"{file}: {key}={errors.quote(found.get(key))} is not supported; supported: {supported}"
        )

    if found.get("peft_type") != "LORA":
        refuse("peft_type", "'LORA'")
    if found.get("bias", "none") != "none":
        refuse("bias", "'none'")
    if not _is_one_of(found.get("init_lora_weights"), _INITIAL_VALUES):
        refuse("init_lora_weights", "ways that leave the base weights as they are")
    if not _is_one_of(found.get("layers_pattern"), _LAYERS_PATTERNS):
        refuse("layers_pattern", "'layers'")
    for key in sorted(found.keys() - _READ - _HARMLESS):
        if not _is_one_of(found[key], (None, False, [], {}, "")):
            refuse(key, "none of it")
    targets = found.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(map(_is_name, targets)):
        refuse("target_modules", "a list of names of modules")
    return AdapterConfig(
        targets=tuple(targets or ()),
        layers=_layers(found, file, num_layers),
        rank=hf_config.integer(found, "r", file=file),
        alpha=hf_config.number(found, "lora_alpha", file=file),
        rank_pattern=_pattern(found, "rank_pattern", file, hf_config.integer),
        alpha_pattern=_pattern(found, "alpha_pattern", file, hf_config.number),
        is_rank_stabilised=hf_config.flag(found, "use_rslora", file=file),
    )


def _layers(found: Mapping[str, Any], file: str, num_layers: int) -> frozenset[int] | None:
    value = found.get("layers_to_transform")
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    key = "layers_to_transform"
    return frozenset(
        hf_config.integer({key: one}, key, low=0, high=num_layers - 1, file=file) for one in numbers
    )


def _pattern(found: Mapping[str, Any], key: str, file: str, read: Any) -> dict[str, Any]:
    """Returns a mapping of ends of paths to values; PEFT has expressions, too."""
    pattern = found.get(key) or {}
    if not isinstance(pattern, Mapping) or not all(map(_is_name, pattern)):
        raise errors.ConfigError(
            f"{file}: {key}={errors.quote(pattern)} is not supported; supported: names of modules "
            "and their values"
        )
    return {
        name: read({f"{key}.{name}": value}, f"{key}.{name}", file=file)
        for name, value in pattern.items()
    }


def _of_path(pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    """Returns the value of the first name that ends the path."""
    return next((value for name, value in pattern.items() if ends_path(name, path)), default)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)*", value) is not None


def _is_one_of(value: object, options: tuple[object, ...]) -> bool:
    # By type as well: to Python, 0 and False are equal, and so are 1 and True.
    return any(value == one and type(value) is type(one) for one in options)
