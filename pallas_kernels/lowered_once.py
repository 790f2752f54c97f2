"""Kernels are lowered once per process, not once in every program that calls them.

Mosaic GPU lowers a kernel in Python, in 0.3 to 2 s. An engine compiles a dozen programs that call
the same kernels at the same shapes: launches that differ only in their rows, or for one canvas
alone. Within a program `jax.jit` lowers a call once; across programs nothing does. So the first
call of a kernel with its shapes and options exports it (`jax.export`), and every program includes
the exported form. The compiled program is the same either way.

A kernel must be a pure function of its arguments: what it reads elsewhere (tables of tiles, the
device, jax's configuration) must not change within a process, unless `clear` is called. An exported
kernel cannot be used under `jax.vmap`.
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

    Arguments are trees of arrays and of hashable values. The kernel is lowered again for other
    shapes and for other values.
    """
    leaves, tree = jax.tree.flatten((args, options))
    is_array = tuple(isinstance(leaf, jax.Array) for leaf in leaves)
    arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
    fixed = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes)
    shapes = tuple((array.shape, array.dtype) for array in arrays)

    def kernel_of_arrays(*arrays: jax.Array) -> Any:
        given, values = iter(arrays), iter(fixed)
        leaves = [next(given if yes else values) for yes in is_array]
        args, options = jax.tree.unflatten(tree, leaves)
        return kernel(*args, **options)

    # The types belong to the key too: 1, 1.0 and True are equal.
    key = (kernel, tree, is_array, shapes, fixed, tuple(map(type, fixed)))
    with _lock:
        if key not in _exported:
            kernel_of_arrays.__name__ = kernel.__name__  # the name in profiles
            exporting = export.export(jax.jit(kernel_of_arrays), platforms=_PLATFORMS)
            _exported[key] = exporting(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        exported = _exported[key]
    return exported.call(*arrays)


def clear() -> None:
    """Forgets all exported kernels; `jax.clear_caches` forgets the programs that include them."""
    with _lock:
        _exported.clear()
