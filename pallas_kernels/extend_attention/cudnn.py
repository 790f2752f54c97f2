"""Decode attention through cuDNN, for NVIDIA GPUs that our own kernel is not written for.

cuDNN has no paging and no block mask. With one in-flight block a row no mask is needed: every query
of the block sees the same keys. So this gathers a row's K,V into [S, K, H], and cuDNN attends up to
the row's length. The gather writes and reads K,V once more. In prefill every block of a row would
gather them again, so prefill stays with XLA.

Shape letters: B blocks, M pages of a row.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch


def why_not(
    *,
    dtype: jnp.dtype,
    head_dim: int,
    visibility: str,
    tokens: int,
    rows: int,
    block_size: int,
    window: int | None = None,
) -> str | None:
    """Returns why cuDNN cannot serve the shape, or None."""
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if window is not None:
        return f"it has no window, this one is {window}"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim must be a multiple of 8 and at most 128, this is {head_dim}"
    if visibility == "causal":
        return "a causal block over a longer context needs a dense mask"
    if tokens != rows * block_size:
        return f"one block a row only: {tokens=} {rows=} {block_size=}"
    return None


def attend_blocks(
    q: Float[Array, "B block N H"],
    kv_pool: Float[Array, "P 2 K Z H"],
    pages: Int32[Array, "B M"],  # the pages of each block's row
    ends: Int32[Array, " B"],  # how many keys the block sees; 0 gives zeros
    *,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B block N H"]:
    """Returns the attention of each block; `implementation` is that of `jax.nn`."""
    num_pages, _, K, Z, H = kv_pool.shape
    B, M = pages.shape
    live = (jnp.arange(M * Z, dtype=jnp.int32) < ends[:, None])[:, :, None, None]

    def gathered(part: int) -> jax.Array:
        found = kv_pool[jnp.clip(pages, 0, num_pages - 1), part]  # [B, M, K, Z, H]
        # Dead keys get probability 0, but 0 * nan is nan: their values must be 0 too.
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
