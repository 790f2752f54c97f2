"""From the fused projection of a layer to rotated queries and the K,V that the pool holds.

The op is the sum of a split product's parts, the bias, per-head RMSNorm of q and k, the rotation,
and the write of K,V into the paged pool. Together they move each byte once. As separate steps they
are two to five kernels of a few microseconds, and launching each takes longer than moving its
bytes. The op rounds as the separate steps do: each sum of two parts, the bias, the norm and the
rotation end in the activation dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.rotate_and_cache import checks, mosaic_gpu, reference


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    pool_dtype: jnp.dtype,
    head_dim: int,
    rotary_dim: int,
) -> dispatch.Choice:
    """Returns which implementation of `rotate_and_cache` serves this shape."""
    reason = mosaic_gpu.why_not(dtype=dtype, head_dim=head_dim, rotary_dim=rotary_dim)
    if jnp.dtype(dtype) != jnp.dtype(pool_dtype):
        reason = f"the projection is {dtype}, the pool holds {pool_dtype}"
    return dispatch.choose("rotate_and_cache", implementation, refusals={"mosaic_gpu": reason})


def rotate_and_cache(
    qkv: tuple[
        Float[Array, "T width"], ...
    ],  # width = (N + 2 * K) * H; their sum is the projection
    bias: Float[Array, " width"] | None,
    norm_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,  # of q and of k
    cos: Float32[Array, "T rotary_dim/2"],
    sin: Float32[Array, "T rotary_dim/2"],
    pool: Float[Array, "P 2 K Z H"],
    kv_indices: Int32[Array, " T"],  # page * Z + offset; indices past the pool are not written
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    implementation: str = "auto",
) -> tuple[Float[Array, "T N H"], Float[Array, "P 2 K Z H"]]:
    """Returns (q, the pool with k and v of every token at its index).

    Indices inside the pool must be unique. The pool is written in place if the caller no longer
    needs the old one, as in a loop or with a donated argument.
    """
    checks.check_shapes(
        qkv, bias, norm_weights, cos, sin, pool, kv_indices,
        num_query_heads=num_query_heads, num_kv_heads=num_kv_heads,
    )  # fmt: skip
    chosen = choose(
        implementation,
        dtype=qkv[0].dtype,
        pool_dtype=pool.dtype,
        head_dim=pool.shape[-1],
        rotary_dim=2 * cos.shape[1],
    )
    return _rotate_and_cache(
        qkv, bias, norm_weights, cos, sin, pool, kv_indices, num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads, eps=eps, implementation=chosen.implementation,
    )  # fmt: skip


@functools.partial(
    jax.jit, static_argnames=("num_query_heads", "num_kv_heads", "eps", "implementation")
)
def _rotate_and_cache(
    qkv, bias, norm_weights, cos, sin, pool, kv_indices, *, num_query_heads, num_kv_heads, eps,
    implementation,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    heads = {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "eps": eps}
    if implementation == "mosaic_gpu":
        dtype, weights = qkv[0].dtype, norm_weights or ()
        q_weight, k_weight = (w.astype(dtype) for w in weights) if weights else (None, None)
        bias = None if bias is None else bias.astype(dtype)
        return lowered_once.call(
            mosaic_gpu.rotate_and_cache, qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices,
            **heads,
        )  # fmt: skip
    return reference.rotate_and_cache(qkv, bias, norm_weights, cos, sin, pool, kv_indices, **heads)
