"""A dense matmul in 8-bit floats (e4m3): weights quantised once, activations in every call.

A row of the weights is an output channel, a row of x is a token, and each has a scale of its own.
So no row depends on another, and a token is the same alone and among others. The accumulation is
in float32; where `xla_fp8` returns bfloat16, its sums are rounded to it before they are scaled,
too.

`xla_fp8` multiplies 8-bit floats, which takes compute capability 8.9 or later (Ada, Hopper). `xla`
widens them first: on a GPU to bfloat16, on a CPU to float32. Both dtypes hold the values and their
products exactly, so all implementations differ in the order and the rounding of their sums alone
(and the tensor cores of Hopper in the bits of a sum).

Shape letters: T tokens, D the contraction, F columns of the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import device, dispatch
from pallas_kernels.fp8_matmul import checks, reference


def choose(implementation: str = "auto", *, columns: int, contraction: int) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = checks.why_not_fp8_product(columns, contraction)
    return dispatch.choose("fp8_matmul", implementation, refusals={"xla_fp8": reason})


def quantize_rows(x: Float[Array, "T D"], *, axis_name: str | None = None) -> reference.Quantized:
    """Returns rows as 8-bit floats with a scale each, as `fp8_matmul` takes weights.

    With an `axis_name`, each rank of a `shard_map` has a part of the columns; the scales are those
    of whole rows, the same on every rank.
    """
    if x.ndim != 2:
        raise ValueError(f"quantize_rows: x must be [T, D], not {x.shape}")
    return _quantize_rows(x, axis_name=axis_name)


def fp8_matmul(
    x: Float[Array, "T D"],
    w: Float[Array, "F D"],  # e4m3
    scale: Float32[Array, " F"],
    *,
    out_dtype: DTypeLike | None = None,
    axis_name: str | None = None,
    implementation: str = "auto",
) -> Float[Array, "T F"]:
    """Returns x @ (w * scale[:, None]).T with x quantised by rows, by default in the dtype of x.

    With an `axis_name`, each rank of a `shard_map` has a part of D, and its part of the sum is
    returned; x is quantised as it would be on one rank.
    A NaN or an infinity in a row of x makes this row of the result NaN, and no other.
    """
    checks.check_shapes(x, w, scale)
    chosen = choose(implementation, columns=len(w), contraction=x.shape[1])
    return _fp8_matmul(
        x,
        w,
        scale,
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        axis_name=axis_name,
        implementation=chosen.implementation,
        wide=jnp.dtype(jnp.float32 if device.local_device().platform == "cpu" else jnp.bfloat16),
    )


_quantize_rows = jax.jit(reference.quantize_rows, static_argnames=("axis_name",))


@functools.partial(jax.jit, static_argnames=("out_dtype", "axis_name", "implementation", "wide"))
def _fp8_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: jnp.dtype,
    axis_name: str | None,
    implementation: str,
    wide: jnp.dtype,
) -> jax.Array:
    values, x_scale = reference.quantize_rows(x, axis_name)
    if implementation == "xla_fp8":
        # The result of a product is large: in 16 bits it is written and read in half the time. Its
        # range is that of float32, and one more rounding to 8 bits is little beside e4m3's 4.
        wanted = jnp.bfloat16 if out_dtype == jnp.bfloat16 else jnp.float32
        product = reference.fp8_product(values, w, wanted)
    else:
        product = reference.widened_product(values, w, wide)
    return reference.scaled(product, x_scale, scale, out_dtype)
