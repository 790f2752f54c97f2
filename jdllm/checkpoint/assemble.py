"""Fills the parameters on the device from checkpoint tensors, with a staging buffer for each.

The loader fills the buffer of one parameter (for example one layer's experts) tensor by tensor,
copies it to the device and drops it. So neither host nor device ever holds the model twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jdllm.checkpoint import safetensors_source, weight_table
from jdllm.host import progress

# place(path, array) -> the parameters, by path, that this array becomes on the device
Place = Callable[[str, np.ndarray], dict[str, jax.Array]]


def on_default_device(path: str, array: np.ndarray) -> dict[str, jax.Array]:
    """Returns the parameter on the default device, after the transfer has ended."""
    return {path: jax.block_until_ready(jax.device_put(array))}


def assemble(
    source: safetensors_source.SafetensorsSource,
    fills: Mapping[str, Sequence[weight_table.Fill]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    *,
    place: Place = on_default_device,
    show_progress: bool = True,
    desc: str = "loading weights",
) -> dict[str, jax.Array]:
    """Returns every parameter of `arrays` (path -> shape, dtype) where `place` puts it."""
    return dict(each(source, fills, arrays, place=place, show_progress=show_progress, desc=desc))


def each(
    source: safetensors_source.SafetensorsSource,
    fills: Mapping[str, Sequence[weight_table.Fill]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    *,
    place: Place = on_default_device,
    show_progress: bool = True,
    desc: str = "loading weights",
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the parameters of `assemble` one by one, and keeps none."""
    for path in progress.bar(arrays, desc=desc, is_shown=show_progress):
        staging = np.empty(arrays[path].shape, arrays[path].dtype)
        for fill in fills[path]:
            fill.row.write(staging, source.read(fill.tensor))
        # It waits. Otherwise the host would hold the staging buffers of all transfers in flight.
        yield from place(path, staging).items()
