"""RMSNorm fused with the additions before it.

`reference.py` computes it with XLA; the kernel in `mosaic_gpu.py` rounds at the same places.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.add_rms_norm import checks, mosaic_gpu, reference


def choose(implementation: str = "auto", *, dtype: jnp.dtype, width: int) -> dispatch.Choice:
    """Returns which implementation of `add_rms_norm` serves this shape."""
    reason = mosaic_gpu.why_not(dtype=dtype, width=width)
    return dispatch.choose("add_rms_norm", implementation, refusals={"mosaic_gpu": reason})


def add_rms_norm(
    x: Float[Array, "T D"],
    added: tuple[Float[Array, "T D"], ...],  # at least one
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns (x + sum(added), rms_norm of that); x, added and both results have one dtype.

    The arrays of `added` are summed first, and every addition rounds to the dtype.
    """
    checks.check_shapes(x, added, weight)
    chosen = choose(implementation, dtype=x.dtype, width=x.shape[1])
    return _add_rms_norm(x, added, weight, eps=eps, implementation=chosen.implementation)


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def _add_rms_norm(x, added, weight, *, eps, implementation) -> tuple[jax.Array, jax.Array]:
    if implementation == "mosaic_gpu":
        weight = weight.astype(x.dtype)
        return lowered_once.call(mosaic_gpu.add_rms_norm, x, added, weight, eps=eps)
    return reference.add_rms_norm(x, added, weight, eps)
