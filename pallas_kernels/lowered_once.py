"""Kernels are lowered once a process, not once in every program that calls them.

Mosaic GPU lowers a kernel in Python, 0.3 to 2 s each, and an engine compiles a dozen programs that
call the same kernels at the same shapes: launches for other rows, for one canvas alone. Within a
program `jax.jit` lowers a call once; across programs nothing does. So a kernel with its shapes and
options is exported (`jax.export`) when it is first called, and each program takes in what was
exported. The compiled program is the same either way.

A kernel must be a pure function of its arguments: what it reads elsewhere (tables of tiles, the
device, jax's configuration) must not change within a process, unless `clear` is called. What is
exported has no rule for `jax.vmap`.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import export

_PLATFORMS = ("cuda",)

_exported: dict[Hashable, export.Exported] = {}
_lock = threading.RLock()  # a kernel may call another


def call(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns kernel(*args, **options).

    Arguments are trees of arrays and of hashable values, for each of which the kernel is lowered
    anew, as for other shapes.
    """
    leaves, tree = jax.tree.flatten((args, options))
    is_array = tuple(isinstance(leaf, jax.Array) for leaf in leaves)
    arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
    fixed = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes)
    shapes = tuple((array.shape, array.dtype) for array in arrays)

    def of_arrays(*arrays: jax.Array) -> Any:
        given, values = iter(arrays), iter(fixed)
        leaves = [next(given if yes else values) for yes in is_array]
        args, options = jax.tree.unflatten(tree, leaves)
        return kernel(*args, **options)

    # The types, too: 1, 1.0 and True are equal.
    key = (kernel, tree, is_array, shapes, fixed, tuple(map(type, fixed)))
    with _lock:
        if key not in _exported:
            of_arrays.__name__ = kernel.__name__  # in profiles
            exporting = export.export(jax.jit(of_arrays), platforms=_PLATFORMS)
            _exported[key] = exporting(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        exported = _exported[key]
    return exported.call(*arrays)


def clear() -> None:
    """Forgets all that was exported; `jax.clear_caches` forgets the programs that hold it."""
    with _lock:
        _exported.clear()
