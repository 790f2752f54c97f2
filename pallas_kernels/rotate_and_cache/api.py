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
from pallas_kernels.add_rms_norm import api as norm_and_rope
from pallas_kernels.rotate_and_cache import mosaic_gpu as kernel


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    pool_dtype: jnp.dtype,
    head_dim: int,
    rotary_dim: int,
) -> dispatch.Choice:
    """Returns which implementation of `rotate_and_cache` serves this shape."""
    reason = kernel.why_not(dtype=dtype, head_dim=head_dim, rotary_dim=rotary_dim)
    if jnp.dtype(dtype) != jnp.dtype(pool_dtype):
        reason = f"the projection is {dtype}, the pool holds {pool_dtype}"
    return dispatch.choose("rotate_and_cache", implementation, refusals={"mosaic_gpu": reason})


def rotated_heads(
    qkv: tuple[jax.Array, ...],  # [T, (N + 2 * K) * H] each: q heads, then k, then v
    bias: jax.Array | None,  # [(N + 2 * K) * H]
    norm_weights: tuple[jax.Array, jax.Array] | None,  # of q and of k, [H] each
    cos: jax.Array,  # float32 [T, rotary_dim / 2]
    sin: jax.Array,  # float32 [T, rotary_dim / 2]
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (q [T, N, H], k [T, K, H], v [T, K, H]) of a projection, by XLA.

    The projection is the sum of its parts, as `dense_matmul` returns them.
    """
    N, K = num_query_heads, num_kv_heads
    total = functools.reduce(jnp.add, qkv)
    T = total.shape[0]
    if bias is not None:
        total = total + bias
    q, k, v = jnp.split(total.reshape(T, N + 2 * K, -1), (N, N + K), axis=1)
    if norm_weights is not None:
        q_weight, k_weight = norm_weights
        q, k = norm_and_rope.rms_norm(q, q_weight, eps), norm_and_rope.rms_norm(k, k_weight, eps)
    return norm_and_rope.apply_rope(q, cos, sin), norm_and_rope.apply_rope(k, cos, sin), v


@functools.partial(
    jax.jit, static_argnames=("num_query_heads", "num_kv_heads", "eps", "implementation")
)
def rotate_and_cache(
    qkv: tuple[jax.Array, ...],  # [T, (N + 2 * K) * H] each; their sum is the projection
    bias: jax.Array | None,  # [(N + 2 * K) * H]
    norm_weights: tuple[jax.Array, jax.Array] | None,  # [H] each
    cos: jax.Array,  # float32 [T, rotary_dim / 2]
    sin: jax.Array,
    pool: jax.Array,  # [P, 2, K, Z, H]
    slots: jax.Array,  # int32 [T]: page * Z + offset; past the pool: not written
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns (q [T, N, H], the pool with k and v of every token in its slot).

    Slots inside the pool must differ from one another. The pool is written in place where the
    caller no longer needs it, as in a loop or with a donated argument.
    """
    N, K, H = num_query_heads, num_kv_heads, pool.shape[-1]
    T, width = cos.shape[0], (N + 2 * K) * H
    weights = norm_weights or ()
    if (
        not qkv
        or any(part.shape != (T, width) for part in qkv)
        or (bias is not None and bias.shape != (width,))
        or any(weight.shape != (H,) for weight in weights)
        or cos.shape != sin.shape
        or slots.shape != (T,)
        or pool.ndim != 5
        or pool.shape[1:3] != (2, K)
    ):
        raise ValueError(
            f"rotate_and_cache: parts of qkv must be [T, (N + 2 * K) * H], bias as wide, norm "
            f"weights [H], cos and sin [T, rotary_dim / 2], pool [P, 2, K, Z, H], slots [T]: qkv "
            f"{[part.shape for part in qkv]}, bias {None if bias is None else bias.shape}, norm "
            f"weights {[weight.shape for weight in weights]}, cos {cos.shape}, sin {sin.shape}, "
            f"pool {pool.shape}, slots {slots.shape}, {num_query_heads=}, {num_kv_heads=}"
        )
    heads = {"num_query_heads": N, "num_kv_heads": K, "eps": eps}
    chosen = choose(
        implementation,
        dtype=qkv[0].dtype,
        pool_dtype=pool.dtype,
        head_dim=H,
        rotary_dim=2 * cos.shape[1],
    )
    if chosen.implementation == "mosaic_gpu":
        dtype = qkv[0].dtype
        q_weight, k_weight = (w.astype(dtype) for w in weights) if weights else (None, None)
        bias = None if bias is None else bias.astype(dtype)
        return lowered_once.call(
            kernel.rotate_and_cache, qkv, bias, q_weight, k_weight, cos, sin, pool, slots, **heads
        )
    q, k, v = rotated_heads(qkv, bias, norm_weights, cos, sin, **heads)
    page, offset = jnp.divmod(slots, pool.shape[3])
    kv = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [T, 2, K, H]
    return q, pool.at[page, :, :, offset].set(kv, mode="drop", unique_indices=True)
