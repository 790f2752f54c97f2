"""Decode attention through cuDNN, for NVIDIA GPUs that our own kernel is not written for.

cuDNN has no paging and no block mask. With one in-flight block a row it needs neither mask: every
query of the block sees the same keys, so a row's K,V are gathered into [S, K, H] and attended up
to the row's length. The gather writes and reads K,V once more, which is why prefill, where every
block of a row would gather it again, stays with XLA.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch


def why_not(
    *,
    dtype: jnp.dtype,
    head_dim: int,
    visibility: str,
    tokens: int,
    rows: int,
    block_size: int,
) -> str | None:
    """Returns why cuDNN cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if head_dim % 8 or head_dim > 128:
        return f"head_dim must be a multiple of 8 and at most 128, this is {head_dim}"
    if visibility == "causal":
        return "a causal block over a longer context needs a dense mask"
    if tokens != rows * block_size:
        return f"one block a row only: {tokens=} {rows=} {block_size=}"
    return None


def attend_blocks(
    q: jax.Array,  # [B, block, N, H]
    kv_pool: jax.Array,  # [P, 2, K, Z, H]
    pages: jax.Array,  # int32 [B, M], the pages of each block's row
    ends: jax.Array,  # int32 [B], how many keys the block sees; 0 gives zeros
    *,
    scale: float,
    implementation: str = "cudnn",
) -> jax.Array:
    """Returns the attention of one block each, [B, block, N, H]; `implementation` is jax.nn's."""
    num_pages, _, K, Z, H = kv_pool.shape
    B, M = pages.shape
    live = (jnp.arange(M * Z, dtype=jnp.int32) < ends[:, None])[:, :, None, None]

    def gathered(part: int) -> jax.Array:
        found = kv_pool[jnp.clip(pages, 0, num_pages - 1), part]  # [B, M, K, Z, H]
        # Dead keys get probability 0, and 0 * nan is nan: they must be 0 themselves.
        return jnp.where(live, found.transpose(0, 1, 3, 2, 4).reshape(B, M * Z, K, H), 0)

    out = jax.nn.dot_product_attention(
        q,
        gathered(0),
        gathered(1),
        scale=scale,
        key_value_seq_lengths=jnp.maximum(ends, 1),
        implementation=implementation,
    )
    return jnp.where((ends > 0)[:, None, None, None], out, 0)
