"""Refuses a model whose weights do not fit, before one of them is read, and says what would fit."""

from __future__ import annotations

import jax.numpy as jnp

from jdllm import errors
from jdllm.device import sharding
from jdllm.models import decoder_config, registry, split


def check(
    config: decoder_config.DecoderConfig,
    shards: sharding.Shards,
    dtype: jnp.dtype,
    device_bytes: int | None,
) -> None:
    """Raises a ConfigError if a rank's weights are larger than what JAX has of each device."""
    if device_bytes is None:
        return
    needed = bytes_of_rank(config, shards, dtype)
    if needed <= device_bytes:
        return
    fits = [
        f"{size} ({of_size / 1e9:.1f} GB each)"
        for size in sharding.SIZES
        if (of_size := _bytes_with(config, size, shards, dtype)) and of_size <= device_bytes
    ]
    advice = f"use tp_size {', '.join(fits)}" if fits else "no tp_size of this host's would fit"
    raise errors.ConfigError(
        f"tp_size={shards.tp}: the weights need {needed / 1e9:.1f} GB of each device, of which JAX "
        f"has {device_bytes / 1e9:.1f} GB (XLA_PYTHON_CLIENT_MEM_FRACTION sets its share); {advice}"
    )


def bytes_of_rank(
    config: decoder_config.DecoderConfig, shards: sharding.Shards, dtype: jnp.dtype
) -> int:
    """Returns the bytes of the weights that each rank holds."""
    family = registry.family(config.spec.architecture)
    _, shapes = family.abstract(split.local_config(config, shards), dtype=dtype)
    return sum(one.size * one.dtype.itemsize for one in shapes.values())


def _bytes_with(
    config: decoder_config.DecoderConfig, size: int, shards: sharding.Shards, dtype: jnp.dtype
) -> int | None:
    """Returns the bytes of a rank of `size`, None if the model cannot be split so."""
    try:
        wanted = split.shards_of(config, size, 1 if shards.ep == 1 < shards.tp else None)
    except errors.ConfigError:
        return None
    return bytes_of_rank(config, wanted, dtype)
