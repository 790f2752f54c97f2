"""The gather and lengths of the cuDNN fallback, with XLA instead of cuDNN; its refusals."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.extend_attention import cudnn


def attend_by_loops(q, pool, pages, ends, scale):
    B, block, N, H = q.shape
    K = pool.shape[2]
    out = np.zeros(q.shape, np.float64)
    for b, t, n in np.ndindex(B, block, N):
        if ends[b] == 0:
            continue
        rows = pool[pages[b], :, n // (N // K)]  # [M, 2, Z, H]
        keys, values = (rows[:, part].reshape(-1, H)[: ends[b]] for part in (0, 1))
        scores = keys @ q[b, t, n] * scale
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ values / weights.sum()
    return out


def test_blocks_see_their_rows_keys_and_nothing_else():
    rng = np.random.default_rng(0)
    B, block, N, K, Z, H, M = 3, 4, 4, 2, 8, 16, 3
    q = rng.normal(size=(B, block, N, H)).astype(np.float32)
    pool = rng.normal(size=(B * M + 1, 2, K, Z, H)).astype(np.float32)
    pages = rng.permutation(B * M).reshape(B, M).astype(np.int32)
    ends = np.array([20, 24, 0], np.int32)
    for b in range(B):  # what is past a row's end must not matter
        for at in range(ends[b], M * Z):
            pool[pages[b, at // Z], :, :, at % Z] = np.nan
    out = cudnn.attend_blocks(
        jnp.asarray(q), jnp.asarray(pool), jnp.asarray(pages), jnp.asarray(ends),
        scale=0.25, implementation="xla",
    )  # fmt: skip
    np.testing.assert_allclose(out, attend_by_loops(q, pool, pages, ends, 0.25), atol=1e-5)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"dtype": jnp.float32}, "16-bit"),
        ({"head_dim": 256}, "at most 128"),
        ({"visibility": "causal"}, "dense mask"),
        ({"tokens": 256}, "one block a row"),
    ],
)
def test_refusals(facts, reason):
    defaults = {
        "dtype": jnp.bfloat16, "head_dim": 128, "visibility": "block_causal", "tokens": 128,
        "rows": 4, "block_size": 32,
    }  # fmt: skip
    found = cudnn.why_not(**(defaults | facts))
    assert found is None if reason is None else reason in found
