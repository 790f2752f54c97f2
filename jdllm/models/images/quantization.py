"""Weights in 8-bit floats: where they stand in a module, and how they are made while it loads.

A checkpoint holds weights in 16 or 32 bits. Each is read into float32, which loses nothing,
quantised on the device, and dropped before the next one is read. So at most the quantised model and
one weight in float32 are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdllm.layers import fp8_weight
from jdllm.models import split

Shapes = Mapping[str, jax.ShapeDtypeStruct]

_VALUES, _SCALE = ".values", ".scale"
_FP8 = jnp.dtype(jnp.float8_e4m3fn)


def replace_weights(module: nnx.Module, is_quantized: Callable[[str], bool]) -> None:
    """Puts an `Fp8Weight` in the place of each parameter whose dotted path is named."""
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        if not is_quantized(".".join(map(str, path))):
            continue
        parent: Any = module  # lists by number, modules by name
        for part in path[:-1]:
            parent = (
                parent[int(str(part))]
                if isinstance(parent, nnx.List)
                else getattr(parent, str(part))
            )
        setattr(parent, str(path[-1]), fp8_weight.Fp8Weight(leaf.shape))


def read_as(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what must be read for the parameters of a module: quantised weights in float32."""
    quantized = _quantized(shapes)
    made = {path + suffix for path in quantized for suffix in (_VALUES, _SCALE)}
    kept = {path: shape for path, shape in shapes.items() if path not in made}
    return kept | {
        path: jax.ShapeDtypeStruct(shapes[path + _VALUES].shape, jnp.float32) for path in quantized
    }


def quantize(
    arrays: Iterable[tuple[str, jax.Array]],
    shapes: Shapes,
    place: split.Placement | None = None,
) -> dict[str, jax.Array]:
    """Returns the parameters of a module, given those of `read_as` one after the other.

    With a `place`, which has put them on a mesh, they are those of one device, in its parts.
    """
    quantized = _quantized(shapes)
    params = {}
    for path, array in arrays:
        if path in quantized:
            # The wait keeps the next weight from being read while this one is still there.
            params |= jax.block_until_ready(_of_weight(path, array, place))
        else:
            params[path] = array
        del array  # else it would live until the next one is there
    return params


def _of_weight(path: str, array: jax.Array, place: split.Placement | None) -> dict[str, jax.Array]:
    how = None if place is None else place.cuts[path]
    if place is None or how is None:
        return fp8_weight.quantized(path, array)
    return fp8_weight.quantized_parts(path, array, how, place.mesh)


def _quantized(shapes: Shapes) -> set[str]:
    return {path.removesuffix(_VALUES) for path, one in shapes.items() if one.dtype == _FP8}
