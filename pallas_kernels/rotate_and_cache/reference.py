"""Rotation of q and k, and K,V written to the paged pool, by XLA.

The rotation is float32, with one cast at the end.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.add_rms_norm.reference import rms_norm


def rotate_and_cache(
    qkv: tuple[Float[Array, "T width"], ...],  # width = (N + 2 * K) * H
    bias: Float[Array, " width"] | None,
    norm_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    cos: Float32[Array, "T rotary_dim/2"],
    sin: Float32[Array, "T rotary_dim/2"],
    pool: Float[Array, "P 2 K Z H"],
    kv_indices: Int32[Array, " T"],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Float[Array, "T N H"], Float[Array, "P 2 K Z H"]]:
    """Returns (q, the pool); see `pallas_kernels.rotate_and_cache`."""
    heads = {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "eps": eps}
    q, k, v = rotated_heads(qkv, bias, norm_weights, cos, sin, **heads)
    page, offset = jnp.divmod(kv_indices, pool.shape[3])
    kv = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [T, 2, K, H]
    return q, pool.at[page, :, :, offset].set(kv, mode="drop", unique_indices=True)


def rotated_heads(
    qkv: tuple[Float[Array, "T width"], ...],  # width = (N + 2 * K) * H: q heads, then k, then v
    bias: Float[Array, " width"] | None,
    norm_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,  # of q and of k
    cos: Float32[Array, "T rotary_dim/2"],
    sin: Float32[Array, "T rotary_dim/2"],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Returns (q, k, v) of a projection, by XLA.

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
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def apply_rope(
    x: Float[Array, "T N H"],
    cos: Float32[Array, "T rotary_dim/2"],
    sin: Float32[Array, "T rotary_dim/2"],
) -> Float[Array, "T N H"]:
    """Returns `x` with the first `rotary_dim` dims of every head rotated.

    Dim j of the rotated dims pairs with dim j + rotary_dim / 2. There is one cast, at the end.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
