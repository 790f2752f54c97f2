"""Which arguments attention over a paged pool accepts."""

import jax


def check_window(window: int | None, visibility: str) -> None:
    """Raises ValueError for a window of no token, or with a visibility that has none."""
    if window is None:
        return
    if window < 1 or visibility == "block_causal":
        raise ValueError(f"extend_attention: {window=} is not supported with {visibility=}")


def check_shapes(
    q: jax.Array,
    kv_pool: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    kv_lens: jax.Array,
    page_table: jax.Array,
    block_size: int,
    q_len: int | None,
) -> None:
    """Raises ValueError if the arrays and sizes do not fit together."""
    shapes = (
        f"q {q.dtype}{q.shape}, kv_pool {kv_pool.dtype}{kv_pool.shape}, "
        f"cu_q_lens {cu_q_lens.shape}, context_lens {context_lens.shape}, "
        f"kv_lens {kv_lens.shape}, page_table {page_table.shape}, {block_size=}, {q_len=}"
    )
    ranks = (q.ndim, kv_pool.ndim, cu_q_lens.ndim, context_lens.ndim, kv_lens.ndim, page_table.ndim)
    if ranks != (3, 5, 1, 1, 1, 2):
        raise ValueError(f"extend_attention: ranks must be (3, 5, 1, 1, 1, 2): {shapes}")
    T, N, H = q.shape
    rows = page_table.shape[0]
    problems = {
        "the pool's second axis must be 2 (K and V)": kv_pool.shape[1] != 2,
        "head dims differ": kv_pool.shape[4] != H,
        "query heads must be a multiple of kv heads": N % kv_pool.shape[2] != 0,
        "tokens must be a positive multiple of block_size": T == 0 or T % block_size != 0,
        "q and kv_pool must have one dtype": q.dtype != kv_pool.dtype,
        "row counts differ": not (
            cu_q_lens.shape[0] - 1 == rows == context_lens.shape[0] == kv_lens.shape[0]
        ),
        "page_table must not be empty": 0 in page_table.shape,
        "q_len must be whole blocks, and tokens must be rows * q_len": q_len is not None
        and (q_len < 1 or q_len % block_size != 0 or rows * q_len != T),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"extend_attention: {problem}: {shapes}")
