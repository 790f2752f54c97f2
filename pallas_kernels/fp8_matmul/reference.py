"""Matmuls in 8-bit floats by XLA.

XLA's GemmRewriter (`xla/service/gpu/transforms/gemm_rewriter.cc`) turns a dot whose operands are
e4m3 into a cuBLASLt product if both are matrices and the result is float32 or has 16 bits. It takes
scales of an operand only if they are scalars. Here each row has its own, so they are applied to the
result, outside of the dot. cuBLASLt needs the contraction innermost in both operands, as it is
here, and accumulates in the tensor cores' float32 of fewer bits ("fast accumulation", XLA's default
precision).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
SCALE_DTYPE = jnp.dtype(jnp.float32)
LARGEST = float(jnp.finfo(DTYPE).max)  # 448
# Of a row whose largest magnitude is smaller. Its reciprocal is finite, so a row of zeros stays 0.
_LEAST_SCALE = float(jnp.finfo(SCALE_DTYPE).tiny)


class Quantized(NamedTuple):
    """Rows as 8-bit floats: row i is about `values[i] * scale[i]`."""

    values: Float[Array, "T D"]
    scale: Float32[Array, " T"]


def quantize_rows(x: Float[Array, "T D"], axis_name: str | None = None) -> Quantized:
    """Returns each row scaled so that its largest magnitude is the largest 8-bit float.

    A row with a NaN or an infinity becomes NaN, and no other row does. With an `axis_name`, each
    rank of that axis has a part of every row, and the scale is that of the whole row.
    """
    x = x.astype(SCALE_DTYPE)
    largest = jnp.max(jnp.abs(x), axis=1)
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    scale = jnp.maximum(largest / LARGEST, _LEAST_SCALE)
    # A product may exceed 448 by its rounding, but what is below 464 rounds to 448.
    return Quantized((x * (1 / scale)[:, None]).astype(DTYPE), scale)


def scaled(
    product: Float[Array, "T F"],
    x_scale: Float32[Array, " T"],
    scale: Float32[Array, " F"],
    out_dtype: DTypeLike,
) -> Float[Array, "T F"]:
    """Returns the result of a product of quantised values."""
    return (product.astype(SCALE_DTYPE) * x_scale[:, None] * scale[None, :]).astype(out_dtype)


def fp8_product(
    x: Float[Array, "T D"], w: Float[Array, "F D"], dtype: DTypeLike = SCALE_DTYPE
) -> Float[Array, "T F"]:
    """Returns x @ w.T of 8-bit floats, multiplied as such, rounded to a dtype."""
    return _product(x, w, dtype)


def widened_product(
    x: Float[Array, "T D"], w: Float[Array, "F D"], dtype: DTypeLike
) -> Float32[Array, "T F"]:
    """Returns x @ w.T of 8-bit floats, which `dtype` holds exactly, as it does their products.

    float32 and bfloat16 do: e4m3 has 4 bits of precision and exponents from -9 to 8.
    """
    return _product(x.astype(dtype), w.astype(dtype), SCALE_DTYPE)


def _product(
    x: Float[Array, "T D"], w: Float[Array, "F D"], dtype: DTypeLike
) -> Float[Array, "T F"]:
    contracted = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contracted, preferred_element_type=dtype)
