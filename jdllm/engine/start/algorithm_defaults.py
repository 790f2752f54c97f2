"""Which denoising algorithms an engine compiles, and the defaults of their options.

The attention of a family decides which kind of algorithm it can run: a model that sees no later
block writes block after block, a model that sees the whole sequence writes a canvas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jdllm import errors
from jdllm.algorithms import limits, lookup
from jdllm.options import sampling_params
from jdllm.options.config import EngineConfig
from jdllm.spec import ModelSpec

# Keys of a generation_config.json that are options of the rule of models without a mask token;
# the sampler has an object of its own, whose class says which rule it is.
_SAMPLER, _SAMPLER_CLASS = "sampler_config", ("_cls_name", "EntropyBoundSamplerConfig")
GENERATION_KEYS = frozenset(
    option.name
    for algorithm in lookup.of_kind(lookup.UNIFORM).values()
    for option in algorithm.options
) | {_SAMPLER}


def choose(
    config: EngineConfig, generation_config: dict[str, Any], spec: ModelSpec
) -> tuple[tuple[str, ...], sampling_params.DllmParams]:
    """Returns (compiled algorithms, default options).

    The checkpoint's recommendation (generation_config.json, "dllm") holds unless the
    user names another algorithm. The user's options override single values of it.
    """
    recommended = generation_config.get("dllm") or {}
    if not isinstance(recommended, dict):
        raise errors.ConfigError(f"generation_config.json: dllm={recommended!r} must be an object")
    if spec.diffusion.kind == lookup.UNIFORM:
        recommended = _generation_options(generation_config) | recommended
    names = config.algorithms()
    kind = spec.diffusion.kind
    assert kind is not None, "`kinds.kind_of` refuses models without a kind first"
    fitting = _fitting(spec, kind)
    if not names:
        names = (
            recommended.get("algorithm", spec.diffusion.default_algorithm or next(iter(fitting))),
        )
    _check_kind(names, fitting, spec)
    options = config.algorithm_options()
    if options.pop("block_size", None) is not None and kind == lookup.CANVAS:
        raise errors.ConfigError(
            f"dllm_algorithm_config: {spec.architecture} has no block_size of its own; "
            "block_length is an option of its algorithms"
        )
    if recommended.get("algorithm", names[0]) != names[0]:
        recommended = {}
    # As of a request on top of a server's: what a user gives replaces alternatives of the
    # checkpoint's, which nobody could take back otherwise.
    named = {"algorithm": names[0]}
    base = _resolve(recommended | named, sampling_params.DllmParams(), "generation_config.json: ")
    resolved = _resolve(options | named, base, "")
    try:
        limits.check_family(resolved.options, is_causal=spec.diffusion.is_causal)
    except errors.RequestError as error:
        raise errors.ConfigError(f"dLLM options of {names[0]}: {error}") from error
    return names, resolved


def _resolve(
    options: Mapping[str, Any], base: sampling_params.DllmParams, place: str
) -> sampling_params.DllmParams:
    """Returns the options on top of `base`; a wrong one is a ConfigError that names its place."""
    try:
        return sampling_params.DllmParams.from_mapping(options).resolve(base)
    except errors.RequestError as error:
        raise errors.ConfigError(
            f"{place}dLLM options of {options['algorithm']}: {error}"
        ) from error


def _fitting(spec: ModelSpec, kind: str) -> dict[str, lookup.Algorithm]:
    """Returns the algorithms that the family can run."""
    family = "causal" if spec.diffusion.is_causal else "block_causal"
    return {
        name: one
        for name, one in lookup.of_kind(kind).items()
        if kind != lookup.BLOCK or one.families in ("all", family)
    }


def _generation_options(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the rule that a checkpoint gives as keys of its own."""
    sampler = generation_config.get(_SAMPLER) or {}
    if not isinstance(sampler, dict):
        raise errors.ConfigError(
            f"generation_config.json: {_SAMPLER}={errors.quote(sampler)} must be an object"
        )
    for key, value in sampler.items():
        if key not in GENERATION_KEYS and (key, value) != _SAMPLER_CLASS:
            raise errors.ConfigError(
                f"generation_config.json: {_SAMPLER}.{key}={errors.quote(value)} is not supported"
            )
    found = generation_config | sampler
    return {key: found[key] for key in sorted(GENERATION_KEYS - {_SAMPLER}) if key in found}


def _check_kind(
    names: Iterable[str], fitting: Mapping[str, lookup.Algorithm], spec: ModelSpec
) -> None:
    """Raises a ConfigError for a known algorithm that the family cannot run."""
    for name in names:
        if name in lookup.TABLE and name not in fitting:
            raise errors.ConfigError(
                f"{spec.architecture}, a model with {spec.diffusion.attention_pattern.value} "
                f"attention, cannot run dllm_algorithm {name!r}; it runs {', '.join(fitting)}"
            )
        if name in fitting and fitting[name].moves_tokens and spec.diffusion.edit_tokens is None:
            raise errors.ConfigError(
                f"{spec.architecture} cannot run dllm_algorithm {name!r}: its config.json has no "
                "delete_token_id and split_token_id"
            )
