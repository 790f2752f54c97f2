"""Which arguments rotation and the write of K,V accept."""

import jax


def check_shapes(
    qkv: tuple[jax.Array, ...],
    bias: jax.Array | None,
    norm_weights: tuple[jax.Array, jax.Array] | None,
    cos: jax.Array,
    sin: jax.Array,
    pool: jax.Array,
    kv_indices: jax.Array,
    *,
    num_query_heads: int,
    num_kv_heads: int,
) -> None:
    """Raises ValueError if the arrays do not fit together."""
    N, K, H = num_query_heads, num_kv_heads, pool.shape[-1]
    T, width = cos.shape[0], (N + 2 * K) * H
    weights = norm_weights or ()
    if (
        not qkv
        or any(part.shape != (T, width) for part in qkv)
        or (bias is not None and bias.shape != (width,))
        or any(weight.shape != (H,) for weight in weights)
        or cos.shape != sin.shape
        or kv_indices.shape != (T,)
        or pool.ndim != 5
        or pool.shape[1:3] != (2, K)
    ):
        raise ValueError(
            f"rotate_and_cache: parts of qkv must be [T, (N + 2 * K) * H], bias as wide, norm "
            f"weights [H], cos and sin [T, rotary_dim / 2], pool [P, 2, K, Z, H], kv_indices [T]: "
            f"qkv {[part.shape for part in qkv]}, bias {None if bias is None else bias.shape}, "
            f"norm weights {[weight.shape for weight in weights]}, cos {cos.shape}, "
            f"sin {sin.shape}, "
            f"pool {pool.shape}, kv_indices {kv_indices.shape}, {num_query_heads=}, {num_kv_heads=}"
        )
