"""Fills the parameters on the device from checkpoint tensors, with a staging buffer for each.

The loader fills the buffer of one parameter (for example one layer's experts) tensor by tensor,
copies it to the device and drops it. So neither host nor device ever holds the model twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from jdllm import progress
from jdllm.checkpoint import safetensors_source, weight_table


def assemble(
    source: safetensors_source.SafetensorsSource,
    fills: Mapping[str, Sequence[weight_table.Fill]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    *,
    show_progress: bool = True,
    desc: str = "loading weights",
) -> dict[str, jax.Array]:
    """Returns every parameter of `arrays` (path -> shape, dtype) on the default device."""
    return dict(each(source, fills, arrays, show_progress=show_progress, desc=desc))


def each(
    source: safetensors_source.SafetensorsSource,
    fills: Mapping[str, Sequence[weight_table.Fill]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    *,
    show_progress: bool = True,
    desc: str = "loading weights",
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the parameters of `assemble` one by one, and keeps none."""
    for path in progress.bar(arrays, desc=desc, is_shown=show_progress):
        staging = np.empty(arrays[path].shape, arrays[path].dtype)
        for fill in fills[path]:
            fill.row.write(staging, source.read(fill.tensor))
        # Without this wait, the host would hold the staging buffers of all transfers in flight.
        yield path, jax.block_until_ready(jax.device_put(staging))
