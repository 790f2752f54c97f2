"""Options of a request that an algorithm cannot honour: refused, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.algorithms.options import Algorithm

NEUTRAL = {"top_p": (None, 1), "top_k": (None, 0, -1)}


def check(
    algorithm: Algorithm,
    *,
    temperature: float | None,
    filters: Mapping[str, float | None],
    min_new_tokens: int | None,
) -> None:
    """Raises a `RequestError` for the first option that the algorithm cannot honour.

    `filters` are top_p and top_k.
    """
    hint = "temperature and seed are supported"
    if algorithm.has_own_temperature:
        hint = f"its options are {', '.join(algorithm.defaults)}"
        if temperature not in (None, 0, 1):
            raise errors.RequestError(
                f"temperature={errors.quote(temperature)} is not supported by "
                f"{algorithm.name}, whose temperature falls from t_max to t_min; "
                "supported: 1, and 0 to take the most probable tokens",
                param="temperature",
            )
    for name, value in filters.items():
        if value not in NEUTRAL[name] and not algorithm.takes_filters:
            raise errors.RequestError(
                f"{name}={errors.quote(value)} is not supported by {algorithm.name}; leave it out, "
                f"{hint}",
                param=name,
            )
    if min_new_tokens and algorithm.moves_tokens:
        raise errors.RequestError(
            f"min_new_tokens={errors.quote(min_new_tokens)} is not supported by "
            f"{algorithm.name}, whose edits move end tokens to earlier positions",
            param="min_new_tokens",
        )


def check_family(options: Mapping[str, Any], *, is_causal: bool) -> None:
    """Raises a `RequestError` for an option of an algorithm that the model's family lacks.

    `is_causal`: K,V of written blocks are those of a causal forward.
    """
    if options.get("seed_first") and not is_causal:
        raise errors.RequestError(
            "seed_first=true is not supported by this model, since no causal forward precedes its "
            "blocks; leave it out",
            param="dllm.seed_first",
        )
