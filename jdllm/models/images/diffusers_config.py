"""What the config.json files of diffusers' transformers share: known keys, and rotary axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jdllm import errors


def values(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], *, only_default: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the values of all keys; a missing or null one has the default of the class.

    Keys that begin with an underscore are bookkeeping of diffusers. Raises a ConfigError that names
    an unknown key, or one of `only_default` with another value than its default.
    """
    given = {
        key: value
        for key, value in hf.items()
        if value is not None and not key.startswith("_")  # _class_name, _diffusers_version
    }
    for key, value in given.items():
        if key not in defaults:
            raise errors.ConfigError(
                f"config.json: unknown key {key}={errors.quote(value)}"
                f"{errors.nearest(key, defaults)}"
            )
        if key in only_default and value != defaults[key]:
            raise errors.ConfigError(
                f"config.json: {key}={errors.quote(value)} is not supported; supported: "
                f"{defaults[key]}"
            )
    return {**defaults, **given}


def axes(found: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns a size for each of the three axes: frame or caption, rows, columns."""
    value = found[key]
    is_list = isinstance(value, list | tuple)
    if not is_list or len(value) != 3 or not all(type(n) is int and n > 0 for n in value):
        raise errors.ConfigError(
            f"config.json: {key}={errors.quote(value)} must be three positive integers"
        )
    return tuple(value)


def check_even(key: str, dims: tuple[int, ...]) -> None:
    """Raises a ConfigError unless all dims are even: rotary positions turn pairs."""
    if any(dim % 2 for dim in dims):
        raise errors.ConfigError(f"config.json: {key}={dims} must be even")
