"""Attention of packed in-flight blocks over a paged K,V pool.

The in-flight tokens' K,V are already in the pool, so one pass covers context and in-flight tokens
alike. `reference.py` computes the op with XLA; the kernel for Hopper is in `mosaic_gpu.py`, and
`cudnn.py` serves other NVIDIA GPUs.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.extend_attention import checks, cudnn, mosaic_gpu, reference
from pallas_kernels.extend_attention.reference import AttentionTiling, Visibility


def choose(
    implementation: str = "auto",
    *,
    dtype: jnp.dtype,
    head_dim: int,
    page_size: int,
    block_size: int,
    q_heads: int,
    kv_heads: int,
    visibility: Visibility,
    tokens: int,
    rows: int,
    window: int | None = None,
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    refusals = {
        "mosaic_gpu": mosaic_gpu.why_not(
            dtype=dtype,
            head_dim=head_dim,
            page_size=page_size,
            block_size=block_size,
            q_heads=q_heads,
            kv_heads=kv_heads,
        ),
        "cudnn": cudnn.why_not(
            dtype=dtype,
            head_dim=head_dim,
            visibility=visibility,
            tokens=tokens,
            rows=rows,
            block_size=block_size,
            window=window,
        ),
    }
    return dispatch.choose("extend_attention", implementation, refusals=refusals)


def extend_attention(
    q: Float[Array, "T N H"],
    kv_pool: Float[Array, "P 2 K Z H"],  # part 0 is K, part 1 is V
    cu_q_lens: Int32[Array, " R+1"],
    context_lens: Int32[Array, " R"],
    kv_lens: Int32[Array, " R"],
    page_table: Int32[Array, "R pages_per_row"],
    *,
    visibility: Visibility,
    block_size: int,
    scale: float,
    q_len: int | None = None,
    window: int | None = None,
    implementation: str = "auto",
    tiling: AttentionTiling = reference.DEFAULT_TILING,
) -> Float[Array, "T N H"]:
    """Returns the attention output in q's dtype.

    Row r owns the queries [cu_q_lens[r], cu_q_lens[r + 1]), a whole number of blocks; the query at
    offset i has position context_lens[r] + i. kv_lens[r] is context plus in-flight tokens; 0 marks
    an inactive row. Inactive rows and the padding tokens past cu_q_lens[-1] get zeros. Pages and
    table entries past kv_lens[r] are never used, whatever they hold.

    With `q_len` the caller promises that T = R * q_len and that row r owns the queries
    [r * q_len, (r + 1) * q_len), also if it is inactive. The kernel then needs no work list.

    With a `window`, a causal query sees the last `window` keys up to its own. With "full"
    visibility all queries of a row see its in-flight tokens and the `window - 1` before them.
    """
    checks.check_shapes(q, kv_pool, cu_q_lens, context_lens, kv_lens, page_table, block_size, q_len)
    checks.check_window(window, visibility)
    chosen = choose(
        implementation,
        dtype=q.dtype,
        head_dim=kv_pool.shape[4],
        page_size=kv_pool.shape[3],
        block_size=block_size,
        q_heads=q.shape[1],
        kv_heads=kv_pool.shape[2],
        visibility=visibility,
        tokens=q.shape[0],
        rows=page_table.shape[0],
        window=window,
    )
    return _extend_attention(
        q, kv_pool, cu_q_lens, context_lens, kv_lens, page_table, visibility=visibility,
        block_size=block_size, scale=scale, q_len=q_len, window=window,
        implementation=chosen.implementation, tiling=tiling,
    )  # fmt: skip


@functools.partial(
    jax.jit,
    static_argnames=(
        "visibility",
        "block_size",
        "scale",
        "q_len",
        "window",
        "implementation",
        "tiling",
    ),  # fmt: skip
)
def _extend_attention(
    q, kv_pool, cu_q_lens, context_lens, kv_lens, page_table, *, visibility, block_size, scale,
    q_len, window, implementation, tiling,
) -> jax.Array:  # fmt: skip
    if implementation == "mosaic_gpu":
        return lowered_once.call(
            mosaic_gpu.extend_attention, q, kv_pool, cu_q_lens, context_lens, kv_lens, page_table,
            visibility=visibility, block_size=block_size, scale=scale, q_len=q_len, window=window,
        )  # fmt: skip
    T, N, H = q.shape
    rows, ends = reference.tile_rows_and_visible_ends(
        cu_q_lens, context_lens, kv_lens, tiles=T // block_size, block_size=block_size,
        visibility=visibility, q_len=q_len,
    )  # fmt: skip
    if implementation == "cudnn":
        blocks = q.reshape(T // block_size, block_size, N, H)
        out = cudnn.attend_blocks(blocks, kv_pool, page_table[rows], ends[:, -1], scale=scale)
        return out.reshape(T, N, H)
    begins = None
    if window is not None:
        begins = reference.visible_begins(
            cu_q_lens, context_lens, rows, ends, visibility=visibility, window=window
        )
    return reference.attend(
        q, kv_pool, page_table[rows], ends, begins=begins, scale=scale, tiling=tiling
    )
