"""Which arguments dense matmuls accept."""

import jax


def check_shapes(x: jax.Array, w: jax.Array) -> None:
    """Raises ValueError if the arrays cannot be operands of `dense_matmul`."""
    if not _fit(x, w):
        raise ValueError(
            f"dense_matmul: x must be [T, K] and w [N, K] of one dtype: {_shapes(x, w)}"
        )


def check_swiglu_shapes(x: jax.Array, w: jax.Array) -> None:
    """Raises ValueError if the arrays cannot be operands of `swiglu_matmul`."""
    if not _fit(x, w) or len(w) % 2:
        raise ValueError(
            f"swiglu_matmul: x must be [T, K] and w [2 * F, K] of one dtype: {_shapes(x, w)}"
        )


def _fit(x: jax.Array, w: jax.Array) -> bool:
    return x.ndim == w.ndim == 2 and x.shape[1] == w.shape[1] and x.dtype == w.dtype


def _shapes(x: jax.Array, w: jax.Array) -> str:
    return f"x {x.dtype}{x.shape}, w {w.dtype}{w.shape}"
