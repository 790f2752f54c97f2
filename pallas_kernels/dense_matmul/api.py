"""Dense matmuls of a layer with weights as checkpoints store them, [columns, contraction].

Up to 128 tokens a product takes as long as reading its weights. There the kernel (`mosaic_gpu.py`)
beats XLA, by its tiles and by two steps that it saves: the next kernel adds the parts of a split
contraction as it reads them, and SwiGLU is applied to the accumulators. With more tokens the tensor
cores and shared memory count as well, and another kernel (`wide_matmul.py`) serves the shapes at
which it was measured to beat XLA.

Shape letters: N columns of the result, K the contraction, F columns of gate and of up.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.dense_matmul import checks, mosaic_gpu, reference, wide_matmul


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    tokens: int,
    columns: int,
    contraction: int,
    swiglu: bool = False,
) -> dispatch.Choice:
    """Returns which implementation serves this shape; `columns` are those of the result."""
    shape = {"dtype": dtype, "tokens": tokens, "columns": columns, "contraction": contraction}
    if tokens <= mosaic_gpu.MAX_TOKENS:
        reason = mosaic_gpu.why_not(**shape)
    else:
        reason = wide_matmul.why_not(**shape, swiglu=swiglu)
    return dispatch.choose("dense_matmul", implementation, refusals={"mosaic_gpu": reason})


def dense_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "N K"],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "T N"], ...]:
    """Returns arrays of the dtype of `x` whose sum is x @ w.T.

    `add_rms_norm` and `rotate_and_cache` add them. The kernels split the contraction into parts and
    return one array for each part; XLA returns one array. Each array is rounded to the dtype, and
    so is each sum of two. Where XLA serves (the reference, training, every other device) a product
    is rounded once, as in the models' own code.
    """
    checks.check_shapes(x, w)
    chosen = choose(
        implementation,
        dtype=x.dtype,
        tokens=len(x),
        columns=len(w),
        contraction=x.shape[1],
    )
    return _dense_matmul(x, w, implementation=chosen.implementation)


def swiglu_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "2*F K"],  # all gate rows, then all up rows
    *,
    implementation: str = "auto",
) -> Float[Array, "T F"]:
    """Returns silu(x @ gate.T) * (x @ up.T); a kernel rounds once, XLA rounds every step."""
    checks.check_swiglu_shapes(x, w)
    chosen = choose(
        implementation,
        dtype=x.dtype,
        tokens=len(x),
        columns=len(w) // 2,
        contraction=x.shape[1],
        swiglu=True,
    )
    return _swiglu_matmul(x, w, implementation=chosen.implementation)


@functools.partial(jax.jit, static_argnames=("implementation",))
def _dense_matmul(x: jax.Array, w: jax.Array, *, implementation: str) -> tuple[jax.Array, ...]:
    if implementation == "mosaic_gpu":
        return _mosaic_gpu(x, w)
    return (reference.product(x, w),)


@functools.partial(jax.jit, static_argnames=("implementation",))
def _swiglu_matmul(x: jax.Array, w: jax.Array, *, implementation: str) -> jax.Array:
    if implementation == "mosaic_gpu":
        (out,) = _mosaic_gpu(x, w, swiglu=True)
        return out
    return reference.swiglu_product(x, w)


def _mosaic_gpu(x: jax.Array, w: jax.Array, **options: bool) -> tuple[jax.Array, ...]:
    if len(x) <= mosaic_gpu.MAX_TOKENS:
        return lowered_once.call(mosaic_gpu.dense_matmul, x, w, **options)
    return lowered_once.call(wide_matmul.wide_matmul, x, w, **options)
