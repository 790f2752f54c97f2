"""Residual add and RMSNorm of a token row per CTA, as one kernel.

A warpgroup loads its row of x and of the added arrays, keeps the sum in registers, reduces its
squares once and writes the sum and its normalised form. The bytes are the bound: with one array
added, two rows in and two out, 8 * T * D (34 MB, 8 us, for 2048 tokens of width 2048; measured
8.2 us on an H200). XLA reads the sum again from memory; its normalisation alone takes 13 us there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.hopper import compat

THREADS = 128
WIDTH_STEP = 4 * THREADS  # a load has at least 8 bytes
MAX_WIDTH = 8192  # 64 values a thread


def why_not(*, dtype: jnp.dtype, width: int) -> str | None:
    """Returns why this kernel cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    return why_not_width(width)


def why_not_width(width: int) -> str | None:
    """Returns why a warpgroup cannot hold such a row, or None."""
    if width % WIDTH_STEP or not 0 < width <= MAX_WIDTH:
        return f"the row must be a multiple of {WIDTH_STEP} and at most {MAX_WIDTH}, {width=}"
    return None


def add_rms_norm(
    x: Float[Array, "T D"],
    added: tuple[Float[Array, "T D"], ...],
    weight: Float[Array, " D"],
    *,
    eps: float,
    interpret=None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns (x + sum(added), its RMSNorm); see `pallas_kernels.add_rms_norm`."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return compat.kernel(
        functools.partial(_norm_row, eps=eps),
        out_type=(out, out),
        grid=(x.shape[0],),
        grid_names=("row",),
        # The reciprocal root decides bf16 roundings: keep it that of the reference.
        compiler_params={"approx_math": False},
        interpret=interpret,
    )(x, *added, weight)


def _norm_row(x_gmem, *refs, eps):
    *added_gmem, weight_gmem, sum_gmem, normed_gmem = refs
    row = lax.axis_index("row")
    store_sum_and_norm(
        x_gmem, sum_of_row(added_gmem, row), weight_gmem, sum_gmem, normed_gmem, row=row, eps=eps
    )


def layout_of(width: int) -> Any:
    """Returns how a row lies in the registers of a warpgroup."""
    # A load takes 16 bytes if the row has that many for every thread, else 8.
    vec_size = 8 if width % (8 * THREADS) == 0 else 4
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vec_size)


def sum_of_row(added_gmem, row):
    """Returns the sum of a row of each array in float32, rounded to their dtype as it goes."""
    return functools.reduce(
        functools.partial(_add, added_gmem[0].dtype), [_load(ref[row]) for ref in added_gmem]
    )


def store_sum_and_norm(x_gmem, added, weight_gmem, sum_gmem, normed_gmem, *, row, eps):
    """Adds a row of float32 to x and stores the sum and its norm."""
    dtype = x_gmem.dtype
    total = _add(dtype, _load(x_gmem[row]), added)
    sum_gmem[row] = total.astype(dtype)
    scale = lax.rsqrt(jnp.sum(total * total) / x_gmem.shape[1] + eps)
    rounded = (total * scale).astype(dtype).astype(jnp.float32)
    normed_gmem[row] = (rounded * _load(weight_gmem[...])).astype(dtype)


def _load(values):
    return plgpu.layout_cast(values, layout_of(values.shape[0])).astype(jnp.float32)


def _add(dtype, left, right):  # rounds as a separate addition does
    return (left + right).astype(dtype).astype(jnp.float32)
