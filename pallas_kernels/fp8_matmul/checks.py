"""Which arguments matmuls in 8-bit floats accept."""

import jax

from pallas_kernels.fp8_matmul import reference


def check_shapes(x: jax.Array, w: jax.Array, scale: jax.Array) -> None:
    """Raises ValueError if the arrays cannot be operands of `fp8_matmul`."""
    if (
        x.ndim != 2
        or w.ndim != 2
        or x.shape[1] != w.shape[1]
        or scale.shape != w.shape[:1]
        or w.dtype != reference.DTYPE
        or scale.dtype != reference.SCALE_DTYPE
    ):
        raise ValueError(
            f"fp8_matmul: x must be [T, D], w [F, D] in {reference.DTYPE} and scale [F] in "
            f"{reference.SCALE_DTYPE}: x {x.dtype}{x.shape}, w {w.dtype}{w.shape}, "
            f"scale {scale.dtype}{scale.shape}"
        )


def why_not_fp8_product(columns: int, contraction: int) -> str | None:
    """Returns why XLA should not multiply 8-bit floats of this shape themselves, or None.

    cuBLASLt's products of 8-bit floats need multiples of 16. XLA pads others, and with them the
    weights in every call.
    """
    if columns % 16 or contraction % 16:
        return f"needs multiples of 16, this is {columns=}, {contraction=}"
    return None
