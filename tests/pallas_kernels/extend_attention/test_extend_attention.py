"""Paged block attention equals loops in float64.

In these tests NaN fills all pages that no row owns and all places past a row's length, and unused
table entries hold wrong ids. So the result shows any use of them.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionTiling, extend_attention

N, K, H = 4, 2, 8
ROWS, MAX_PAGES_TOKENS = 5, 192
SCALE = H**-0.5
# float32 sums of at most 200 terms of order 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# Several chunks per row and several groups of tiles, at toy lengths.
SMALL_TILING = AttentionTiling(chunk_tokens=64, group_bytes=3 * 64 * K * (2 * H * 4 + 16 * 4))


@dataclasses.dataclass
class Case:
    q: np.ndarray
    pool: np.ndarray
    cu_q_lens: np.ndarray
    context_lens: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    keys: list[np.ndarray]  # per row, [kv_len, K, H]
    values: list[np.ndarray]

    def run(
        self, *, visibility, block_size, tiling=SMALL_TILING, dtype=jnp.float32, window=None,
        q_len=None,
    ):  # fmt: skip
        out = extend_attention(
            jnp.asarray(self.q, dtype),
            jnp.asarray(self.pool, dtype),
            self.cu_q_lens,
            self.context_lens,
            self.kv_lens,
            self.page_table,
            visibility=visibility,
            block_size=block_size,
            scale=SCALE,
            q_len=q_len,
            window=window,
            tiling=tiling,
        )
        assert out.dtype == dtype
        return np.asarray(out.astype(jnp.float32))


def make_case(seed, lengths, *, page, tokens, garbage=True) -> Case:
    """Builds a batch of (context, in-flight) rows; None is an inactive row."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    max_pages = MAX_PAGES_TOKENS // page
    num_pages = rows * max_pages + 2
    pool = np.full((num_pages, 2, K, page, H), np.nan, np.float32)
    table = np.zeros((rows, max_pages), np.int32)
    if garbage:
        table[:] = rng.choice([-7, -1, 0, num_pages - 1, num_pages, 2**30], table.shape)
    free = list(rng.permutation(num_pages))
    contexts, kv_lens, sizes, keys, values = [], [], [], [], []
    for row, length in enumerate(lengths):
        context, inflight = length or (0, 0)
        kv_len = context + inflight
        k, v = rng.normal(size=(2, kv_len, K, H)).astype(np.float32)
        for first in range(0, kv_len, page):
            table[row, first // page] = page_id = free.pop()
            count = min(page, kv_len - first)
            pool[page_id, 0, :, :count] = k[first : first + count].transpose(1, 0, 2)
            pool[page_id, 1, :, :count] = v[first : first + count].transpose(1, 0, 2)
        contexts.append(context)
        kv_lens.append(kv_len)
        sizes.append(inflight)
        keys.append(k)
        values.append(v)
    cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    q = np.full((tokens, N, H), np.nan, np.float32)
    q[: cu[-1]] = rng.normal(size=(cu[-1], N, H))
    return Case(
        q, pool, cu, np.array(contexts, np.int32), np.array(kv_lens, np.int32), table, keys, values
    )


def oracle(case: Case, *, visibility, block_size, window=None) -> np.ndarray:
    out = np.zeros(case.q.shape, np.float64)
    for row, kv_len in enumerate(case.kv_lens):
        start = case.cu_q_lens[row]
        for offset in range(case.cu_q_lens[row + 1] - start):
            position = case.context_lens[row] + offset
            end = {
                "full": kv_len,
                "causal": min(kv_len, position + 1),
                "block_causal": min(kv_len, (position // block_size + 1) * block_size),
            }[visibility]
            begin = 0
            if window is not None:
                first = position if visibility == "causal" else case.context_lens[row]
                begin = max(0, first - window + 1)
            for head in range(N if end else 0):
                keys = case.keys[row][begin:end, head // (N // K)].astype(np.float64)
                values = case.values[row][begin:end, head // (N // K)].astype(np.float64)
                scores = keys @ case.q[start + offset, head].astype(np.float64) * SCALE
                weights = np.exp(scores - scores.max())
                out[start + offset, head] = weights @ values / weights.sum()
    return out


def ragged_lengths(block: int) -> list:
    """Returns rows without context, with two blocks in flight, inactive, with many blocks, long."""
    longest = MAX_PAGES_TOKENS - block
    return [
        (0, block),
        (3 * block, 2 * block),
        None,
        (block, MAX_PAGES_TOKENS // 2 // block * block),
        (longest // block * block, block),
    ]


@pytest.mark.parametrize("visibility", ["block_causal", "full", "causal"])
@pytest.mark.parametrize("page, block", [(16, 32), (32, 8), (64, 4)], ids=lambda value: str(value))
def test_equals_loops(visibility, page, block):
    lengths = ragged_lengths(block)
    tokens = sum(length[1] for length in lengths if length) + 2 * block
    case = make_case(page, lengths, page=page, tokens=tokens)
    out = case.run(visibility=visibility, block_size=block)
    expected = oracle(case, visibility=visibility, block_size=block)
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    assert np.all(out[case.cu_q_lens[-1] :] == 0)


@pytest.mark.parametrize(
    ("visibility", "window"),
    [("block_causal", None), ("full", None), ("full", 20), ("causal", None), ("causal", 9)],
)
def test_rows_of_a_known_length_equal_loops(visibility, window):
    """An inactive row owns queries, too, and gets zeros."""
    block, q_len = 8, 16
    contexts = (0, 24, 40, MAX_PAGES_TOKENS - q_len)
    case = make_case(5, [(one, q_len) for one in contexts], page=16, tokens=len(contexts) * q_len)
    case.kv_lens[2] = 0
    case.page_table[2] = -1
    options = {"visibility": visibility, "block_size": block, "window": window}
    out = case.run(q_len=q_len, **options)
    np.testing.assert_allclose(out, oracle(case, **options), **TOLERANCE)
    assert (out[2 * q_len : 3 * q_len] == 0).all()


def test_equals_loops_for_random_batches():
    """All batches have one compiled shape; contexts need not be whole blocks or pages."""
    block, page, tokens = 8, 16, 96
    rng = np.random.default_rng(11)
    for draw in range(12):
        lengths, left = [], tokens
        for _ in range(ROWS):
            inflight = min(left, block * int(rng.integers(0, 5)))
            left -= inflight
            context = int(rng.integers(0, MAX_PAGES_TOKENS - inflight + 1))
            lengths.append((context, inflight) if inflight else None)
        case = make_case(draw, lengths, page=page, tokens=tokens)
        out = case.run(visibility="block_causal", block_size=block)
        expected = oracle(case, visibility="block_causal", block_size=block)
        np.testing.assert_allclose(out, expected, **TOLERANCE, err_msg=f"{lengths=}")


@pytest.mark.parametrize("window", [1, 5, 40, 1000])
@pytest.mark.parametrize("visibility", ["full", "causal"])
def test_a_window_hides_what_is_far_to_the_left(visibility, window):
    lengths = [*ragged_lengths(8), (150, 16)]  # no row of the last group begins at its first key
    case = make_case(8, lengths, page=16, tokens=168)
    out = case.run(visibility=visibility, block_size=8, window=window)
    expected = oracle(case, visibility=visibility, block_size=8, window=window)
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    alone = make_case(9, [(150, 16)], page=16, tokens=24)
    out = alone.run(visibility=visibility, block_size=8, window=window)
    expected = oracle(alone, visibility=visibility, block_size=8, window=window)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


def test_a_window_changes_no_bit_of_a_row_that_has_none_of_its_keys_hidden():
    case = make_case(10, ragged_lengths(8), page=16, tokens=136)
    for visibility in ("full", "causal"):
        plain = case.run(visibility=visibility, block_size=8)
        windowed = case.run(visibility=visibility, block_size=8, window=10 * MAX_PAGES_TOKENS)
        np.testing.assert_array_equal(plain, windowed)


def test_default_tiling_agrees():
    case = make_case(5, ragged_lengths(8), page=32, tokens=136)
    out = case.run(visibility="block_causal", block_size=8, tiling=AttentionTiling())
    expected = oracle(case, visibility="block_causal", block_size=8)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


def test_bfloat16():
    case = make_case(6, ragged_lengths(8), page=32, tokens=136)
    rounded = jnp.bfloat16(case.q), [jnp.bfloat16(k) for k in case.keys]
    out = case.run(visibility="full", block_size=8, dtype=jnp.bfloat16)
    case.q, case.keys = np.float32(rounded[0]), [np.float32(k) for k in rounded[1]]
    case.values = [np.float32(jnp.bfloat16(v)) for v in case.values]
    expected = oracle(case, visibility="full", block_size=8)
    # The probabilities and the result are rounded to 8 bits.
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_never_change_a_rows_bits(seed):
    block, page, tokens = 8, 16, 96
    # Both batches have the watched row; every other row, page id and offset differs.
    mine = (40, 2 * block)
    others = [
        [(0, 8), mine, None, (24, 32), (8, 8)],
        [(170, 16), mine, (3, 8), (184, 8), None],
        [None, mine, None, None, None],
        [(0, 40), mine, (56, 24), None, (160, 8)],
    ]
    results = []
    for index, lengths in enumerate(others):
        case = make_case(100 * seed + index, lengths, page=page, tokens=tokens)
        source = make_case(seed, [mine], page=page, tokens=tokens)
        start = case.cu_q_lens[1]
        case.q[start : start + mine[1]] = source.q[: mine[1]]
        for logical in range(-(-sum(mine) // page)):
            pool_page = case.page_table[1, logical]
            case.pool[pool_page] = source.pool[source.page_table[0, logical]]
        out = case.run(visibility="block_causal", block_size=block)
        results.append(out[start : start + mine[1]])
    assert np.all(np.isfinite(results[0])) and np.any(results[0] != 0)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_row_with_queries_but_no_keys_writes_zeros():
    case = make_case(7, [(16, 8), (8, 8)], page=16, tokens=16)
    case.kv_lens[0] = 0
    out = case.run(visibility="full", block_size=8)
    assert np.all(out[:8] == 0)
    assert np.any(out[8:] != 0)


@functools.cache
def prefill_in_groups(tokens=4096, pages=64):
    """Returns a prefill of one row, lowered: its tiles do not fit one group."""
    spec = {
        "q": jnp.zeros((tokens, N, H)),
        "kv_pool": jnp.zeros((pages, 2, K, 64, H)),
        "cu_q_lens": jnp.array([0, tokens]),
        "context_lens": jnp.zeros(1, jnp.int32),
        "kv_lens": jnp.array([tokens]),
        "page_table": jnp.arange(pages)[None],
    }
    tiling = AttentionTiling(group_bytes=2 * 2**20)
    static = {"visibility": "block_causal", "block_size": 32, "scale": SCALE, "tiling": tiling}
    return jax.jit(functools.partial(extend_attention, **static)).lower(**spec)


def test_gathered_memory_is_bounded_for_prefill():
    """A prefill of 4096 tokens must not hold one gathered copy of its context per tile."""
    compiled = prefill_in_groups().compile()
    everything = 4096 // 32 * 4096 * 2 * K * H * 4
    assert compiled.memory_analysis().temp_size_in_bytes < everything / 4


def test_no_array_is_sliced_in_the_loop_over_groups():
    """On GPUs a copy of a moving slice keeps a loop, and all around it, from being a CUDA graph."""
    sliced = re.findall(r"dynamic_slice.*-> tensor<(.*)>", prefill_in_groups().as_text())
    assert sliced and all(re.fullmatch(r"(1x)*[su]?i32", one) for one in sliced), sliced


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((16, 3, H))}, "multiple of kv heads"),
        ({"q": jnp.zeros((12, N, H))}, "multiple of block_size"),
        ({"q": jnp.zeros((16, N, H + 1))}, "head dims differ"),
        ({"q": jnp.zeros((16, N, H), jnp.bfloat16)}, "one dtype"),
        ({"page_table": jnp.zeros(3, jnp.int32)}, "ranks"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, "row counts differ"),
        ({"visibility": "sliding"}, "unknown visibility='sliding'"),
        ({"window": 0}, "window=0 is not supported"),
        ({"window": 4, "visibility": "block_causal"}, "window=4 is not supported with visibility"),
    ],
    ids=["heads", "tokens", "head_dim", "dtype", "table", "rows", "visibility", "none", "blocks"],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "q": jnp.zeros((16, N, H)),
        "kv_pool": jnp.zeros((4, 2, K, 16, H)),
        "cu_q_lens": jnp.zeros(3, jnp.int32),
        "context_lens": jnp.zeros(2, jnp.int32),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "page_table": jnp.zeros((2, 2), jnp.int32),
        "visibility": "full",
        "block_size": 8,
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        extend_attention(**(arguments | change))
