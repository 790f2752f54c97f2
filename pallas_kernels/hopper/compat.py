"""The differences between the jax versions that can run our Mosaic GPU kernels, in one place.

Kernels are called through `kernel`, so that the semantics and options that all kernels share are
set once. Importing this file uses nothing that jax 0.10.2 lacks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

MIN_JAX_VERSION = "0.11.1"

# The accumulator of a wgmma.
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  # jax documents it under this name


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

    `compiler_params` adds to `plgpu.CompilerParams`. `options` are those of plgpu.kernel: grid,
    grid_names, cluster, num_threads and so on. `interpret` is an InterpretGPUParams in tests.
    """
    params = {
        "lowering_semantics": plgpu.LoweringSemantics.Warpgroup,
        "approx_math": True,
        **(compiler_params or {}),
    }
    if interpret is not None:
        options["interpret"] = interpret
    if isinstance(body, functools.partial):  # a kernel has the name of its body, also in profiles
        body = functools.update_wrapper(functools.partial(body), body.func)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(scratch_types),
        compiler_params=plgpu.CompilerParams(**params),
        **options,
    )


def tiled(columns: int, dtype: jax.typing.DTypeLike) -> tuple[Any, Any]:
    """Returns how TMA and wgmma want rows of `columns` in shared memory: swizzled tiles of 8."""
    swizzle = columns * jax.numpy.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def store_narrow(ref: Any, values: jax.Array) -> None:
    """Stores to global memory that is not contiguous; jax 0.12 and later need an option for it."""
    if version_tuple(jax.__version__) < (0, 12, 0):
        ref[...] = values
    else:
        # It is new in jax 0.12.
        plgpu.store(ref, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def load(ref: Any, *, layout: Any, optimized: bool = True) -> jax.Array:
    """Returns the whole of a ref, in a layout of the registers."""
    # jax 0.10.2, where no kernel runs, wants an index too.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def inline_mgpu(
    *, arg_types: Sequence[Any], return_type: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the decorator `plgpu.inline_mgpu`: MLIR of one thread, as an operation of a kernel.

    The decorated function takes a context first, which the operation does not. Its type says so
    here, in jax it does not.
    """
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)
