"""What differs between the jax versions that can run our Mosaic GPU kernels, in one place.

Kernels are called through `kernel`, so that semantics and options that every kernel shares are
set once. Nothing here touches at import time what jax 0.10.2 lacks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

MIN_JAX_VERSION = "0.11.1"


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version such as "0.12.0.1" or "0.13.0.dev1"."""
    numbers = []
    for part in version.split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def supported(jax_version: str | None = None) -> bool:
    """Returns whether this jax (or `jax_version`) has the Mosaic GPU of our kernels."""
    return version_tuple(jax_version or jax.__version__) >= version_tuple(MIN_JAX_VERSION)


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Sequence[Any] = (),
    interpret: Any = None,
    compiler_params: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Returns `plgpu.kernel(body, ...)` with warpgroup semantics.

    `compiler_params` adds to `plgpu.CompilerParams`; `options` are plgpu.kernel's grid, grid_names,
    cluster, num_threads and so on; `interpret` is an InterpretGPUParams in tests.
    """
    params = {
        "lowering_semantics": plgpu.LoweringSemantics.Warpgroup,
        "approx_math": True,
        **(compiler_params or {}),
    }
    if interpret is not None:
        options["interpret"] = interpret
    if isinstance(body, functools.partial):  # a kernel is called after its body, in profiles too
        body = functools.update_wrapper(functools.partial(body), body.func)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(scratch_types),
        compiler_params=plgpu.CompilerParams(**params),
        **options,
    )


def tiled(columns: int, dtype: jax.typing.DTypeLike) -> tuple[Any, Any]:
    """Returns how shared memory holds rows of `columns` for TMA and wgmma: swizzled tiles of 8."""
    swizzle = columns * jax.numpy.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def store_narrow(ref: Any, values: jax.Array) -> None:
    """Stores to global memory that is not contiguous; from jax 0.12 on one has to ask for it."""
    if version_tuple(jax.__version__) < (0, 12, 0):
        ref[...] = values
    else:
        plgpu.store(ref, values, optimized=False)
