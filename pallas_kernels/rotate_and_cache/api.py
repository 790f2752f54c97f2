"""From the fused projection of a layer to rotated queries and the K,V that the pool holds.

The sum of a split product's parts, bias, per-head RMSNorm of q and k, rotation, and the write of
K,V into the paged pool move each byte once; apart they are two to five kernels of a few
microseconds, each longer to launch than its bytes take. Every rounding is that of the steps apart:
each sum of two parts, bias, norm and rotation end in the activation dtype.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.rotate_and_cache import checks, reference
from pallas_kernels.rotate_and_cache import mosaic_gpu as gpu_kernel


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    pool_dtype: jnp.dtype,
    head_dim: int,
    rotary_dim: int,
) -> dispatch.Choice:
    """Returns which implementation of `rotate_and_cache` serves this shape."""
    reason = gpu_kernel.why_not(dtype=dtype, head_dim=head_dim, rotary_dim=rotary_dim)
    if jnp.dtype(dtype) != jnp.dtype(pool_dtype):
        reason = f"the projection is {dtype}, the pool holds {pool_dtype}"
    return dispatch.choose("rotate_and_cache", implementation, refusals={"mosaic_gpu": reason})


def rotate_and_cache(
    qkv: tuple[jax.Array, ...],  # [T, (N + 2 * K) * H] each; their sum is the projection
    bias: jax.Array | None,  # [(N + 2 * K) * H]
    norm_weights: tuple[jax.Array, jax.Array] | None,  # [H] each
    cos: jax.Array,  # float32 [T, rotary_dim / 2]
    sin: jax.Array,
    pool: jax.Array,  # [P, 2, K, Z, H]
    kv_indices: jax.Array,  # int32 [T]: page * Z + offset; past the pool: not written
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns (q [T, N, H], the pool with k and v of every token at its place).

    Slots inside the pool must differ from one another. The pool is written in place where the
    caller no longer needs it, as in a loop or with a donated argument.
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
            gpu_kernel.rotate_and_cache, qkv, bias, q_weight, k_weight, cos, sin, pool, kv_indices,
            **heads,
        )  # fmt: skip
    return reference.rotate_and_cache(qkv, bias, norm_weights, cos, sin, pool, kv_indices, **heads)
