"""Every Mosaic GPU kernel, compiled and run on a Hopper GPU, equals the XLA reference.

The interpreter proves the algorithm, and the lowering proves that it compiles. Only here registers,
barriers and asynchronous copies are real. Run it by hand on a GPU machine:

    python -m pytest tests/pallas_kernels/test_kernels_on_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import device

pytestmark = pytest.mark.gpu
if device.local_device().compute_capability != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

EPS = 1e-6
VISIBILITIES = ("block_causal", "full", "causal")


def normal(rng, *shape, std=1.0):
    return jnp.asarray(rng.normal(size=shape) * std, jnp.bfloat16)


def relative_error(out, reference):
    out, reference = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(out - reference) / np.linalg.norm(reference)


def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def attention_case(rng, rows, *, N=16, K=4, H=128, page=64, block=32, padding=0, width=None):
    """Builds a batch: a row is (context, in-flight) or None; NaN fills what no kernel may read."""
    spans = [row or (0, 0) for row in rows]
    lengths = np.array([new for _, new in spans])
    ends = np.array([context + new for context, new in spans])
    M = -(-(width or max(ends.max(), 1)) // page)
    num_pages = len(rows) * M + 3
    table = rng.permutation(num_pages)[: len(rows) * M].reshape(len(rows), M).astype(np.int32)
    pool = np.full((num_pages, 2, K, page, H), np.nan, np.float32)
    for row, end in enumerate(ends):
        for at in range(end):
            pool[table[row, at // page], :, :, at % page] = rng.normal(size=(2, K, H))
        table[row, -(-int(end) // page) :] = 2**30
    T = int(lengths.sum()) + padding
    q = rng.normal(size=(T, N, H)).astype(np.float32)
    q[lengths.sum() :] = np.nan
    arguments = (
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(pool, jnp.bfloat16),
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        jnp.asarray([context for context, _ in spans], jnp.int32),
        jnp.asarray(ends, jnp.int32),
        jnp.asarray(table),
    )
    return arguments, {"block_size": block, "scale": H**-0.5}


DECODE = {
    "one_row": dict(rows=[(512, 32)]),
    "one_long_row": dict(rows=[(4064, 32)]),
    "ragged_and_empty": dict(rows=[(512, 32), (0, 32), (96, 32), (2016, 32)]),
    "many_rows": dict(rows=[(32 * (i * 7 % 60), 32) for i in range(64)]),
    "two_blocks": dict(rows=[(256, 64), (64, 64), (1984, 64)]),
    "mha": dict(rows=[(512, 32), (480, 32), (0, 32)], N=32, K=32),
    "mha_one_row": dict(rows=[(512, 32)], N=32, K=32),
    "blocks_of_4": dict(rows=[(508, 4), (12, 4), (0, 4), (2044, 4)], N=32, K=8, block=4),
    "blocks_of_8": dict(rows=[(504, 8), (16, 8)], N=32, K=8, block=8),
    "blocks_of_16": dict(rows=[(512, 16), (16, 16)], N=28, K=4, block=16),
    "blocks_of_64": dict(rows=[(512, 64), (64, 64)], block=64),
    "pages_of_32": dict(rows=[(512, 32), (96, 32)], page=32),
    "pages_of_128": dict(rows=[(512, 32), (96, 32)], page=128),
    "head_dim_64": dict(rows=[(512, 32), (96, 32)], H=64, N=14, K=2),
    "wide_table": dict(rows=[(512, 32), (96, 32)], width=8192),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODE)
def test_decode_attention(name):
    problem = DECODE[name]
    arguments, options = attention_case(np.random.default_rng(len(name)), **problem)
    q_len = problem["rows"][0][1]
    for visibility in VISIBILITIES[: 3 if name in ("ragged_and_empty", "two_blocks") else 1]:
        run = pallas_kernels.extend_attention
        out = run(
            *arguments, **options, visibility=visibility, q_len=q_len, implementation="mosaic_gpu"
        )
        expected = run(*wide(arguments), **options, visibility=visibility, implementation="xla")
        assert relative_error(out, expected) < 5e-3, visibility
        again = run(
            *arguments, **options, visibility=visibility, q_len=q_len, implementation="mosaic_gpu"
        )
        np.testing.assert_array_equal(np.asarray(out).view(np.uint16), bits(again))


def bits(array):
    return np.asarray(array).view(np.uint16)


PREFILL = {
    "one_row": dict(rows=[(0, 2048)]),
    "mha": dict(rows=[(0, 1024), (64, 512)], N=32, K=32),
    "ragged": dict(rows=[(0, 96), (512, 32), None, (1024, 1056)], padding=64),
    "blocks_of_4": dict(rows=[(40, 12), (3 * 4, 4), None, (0, 100)], padding=4, block=4, N=32, K=8),
    "pages_of_32": dict(rows=[(0, 512), (96, 160)], page=32),
    "head_dim_64": dict(rows=[(0, 512), (96, 160)], H=64, N=14, K=2),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_attention(name):
    arguments, options = attention_case(np.random.default_rng(len(name)), **PREFILL[name])
    for visibility in VISIBILITIES[: 3 if name == "ragged" else 1]:
        run = pallas_kernels.extend_attention
        out = run(*arguments, **options, visibility=visibility, implementation="mosaic_gpu")
        expected = run(*wide(arguments), **options, visibility=visibility, implementation="xla")
        assert relative_error(out, expected) < 5e-3, visibility
        assert not np.asarray(out[arguments[2][-1] :], np.float32).any()


WINDOWS = {
    "mha": dict(rows=[(320, 64)], N=32, K=32),
    "mha_padded": dict(rows=[(288, 96)], N=32, K=32, padding=32),
    "mha_of_two": dict(rows=[(40, 72), (0, 24)], N=32, K=32, padding=32),
    "long": dict(rows=[(4000, 96)], N=32, K=32),
    "gqa": dict(rows=[(128, 256)], N=28, K=4),
    "gqa_short": dict(rows=[(100, 16)], N=28, K=4, padding=48),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_attention_of_the_window_of_a_canvas(name):
    arguments, options = attention_case(np.random.default_rng(len(name)), **WINDOWS[name], block=8)
    options |= {"visibility": "full"}
    out = pallas_kernels.extend_attention(*arguments, **options, implementation="mosaic_gpu")
    expected = pallas_kernels.extend_attention(*wide(arguments), **options, implementation="xla")
    assert relative_error(out, expected) < 5e-3
    assert not np.asarray(out[arguments[2][-1] :], np.float32).any()


def test_neighbours_never_change_a_rows_bits():
    rows = [(512, 32), (0, 32), (2016, 32), (96, 32)]
    arguments, options = attention_case(np.random.default_rng(5), rows=rows)
    q, pool, cu_q_lens, contexts, ends, table = arguments
    first_pages = pool[table[0, :9]]
    others = jnp.full_like(pool, 3.0).at[table[0, :9]].set(first_pages)
    neighbours = (
        q.at[32:].set(-2.0), others, cu_q_lens,
        contexts.at[1:].set(jnp.array([64, 0, 992])),
        ends.at[1:].set(jnp.array([96, 0, 1024])), jnp.minimum(table, pool.shape[0] - 1),
    )  # fmt: skip
    kept = [
        pallas_kernels.extend_attention(
            *batch, **options, visibility="block_causal", q_len=32, implementation="mosaic_gpu"
        )[:32]
        for batch in (arguments, neighbours)
    ]
    np.testing.assert_array_equal(bits(kept[0]), bits(kept[1]))


def test_cudnn_attends_blocks_of_a_context():
    arguments, options = attention_case(np.random.default_rng(3), rows=[(512, 32), (96, 32)])
    run = pallas_kernels.extend_attention
    out = run(*arguments, **options, visibility="block_causal", implementation="cudnn")
    expected = run(*wide(arguments), **options, visibility="block_causal", implementation="xla")
    assert relative_error(out, expected) < 5e-3


@pytest.mark.parametrize("has_shared", [False, True], ids=["routed", "with-shared"])
@pytest.mark.parametrize(
    ("T", "E", "k", "D", "size"),
    [
        (1, 16, 2, 128, 64), (32, 256, 8, 2048, 512), (100, 256, 8, 2048, 512),
        (512, 256, 8, 2048, 512), (2048, 256, 8, 2048, 512), (4096, 64, 8, 2048, 512),
        (8192, 16, 2, 1024, 192), (32, 128, 8, 2048, 768), (32, 64, 8, 4096, 1024),
    ],
)  # fmt: skip
def test_grouped_matmul(T, E, k, D, size, has_shared):
    rng = np.random.default_rng(T)
    x = normal(rng, T, D)
    weights = normal(rng, E, 2 * size, D, std=D**-0.5), normal(rng, E, D, size, std=size**-0.5)
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
    ids[: T // 4, 0] = rng.integers(-2, E + 2, T // 4)
    expert_weights = rng.uniform(0.1, 1, (T, k)).astype(np.float32)
    valid = rng.random(T) < 0.9
    shared = None
    if has_shared:
        shared = normal(rng, 2 * size, D, std=D**-0.5), normal(rng, D, size, std=size**-0.5)
    else:
        x = jnp.where(jnp.asarray(valid)[:, None], x, jnp.nan)
    arguments = (x, *weights, jnp.asarray(ids), jnp.asarray(expert_weights))
    run = pallas_kernels.grouped_matmul
    out = run(*arguments, shared=shared, valid=valid, implementation="mosaic_gpu")
    with jax.default_matmul_precision("highest"):
        expected = run(*wide(arguments), shared=wide(shared), valid=valid, implementation="xla")
    assert relative_error(out, expected) < 8e-3
    again = run(*arguments, shared=shared, valid=valid, implementation="mosaic_gpu")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(again))


@pytest.mark.parametrize("T", [1, 32, 2048])
@pytest.mark.parametrize(("E", "groups", "kept"), [(256, 8, 4), (128, 1, 1)])
def test_routing(T, E, groups, kept):
    rng = np.random.default_rng(T)
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=E) * 0.1, jnp.float32)
    options = {
        "experts_per_token": 8, "num_groups": groups, "kept_groups": kept, "scaling_factor": 2.5,
    }  # fmt: skip
    ids, weights = pallas_kernels.top_k_routing(
        logits, bias, **options, implementation="mosaic_gpu"
    )
    expected = pallas_kernels.top_k_routing(logits, bias, **options, implementation="xla")
    # One rounding in a sigmoid may swap two experts with nearly equal scores.
    same = np.asarray(ids == expected[0]).all(axis=1)
    assert same.mean() > 0.999
    np.testing.assert_allclose(weights[same], expected[1][same], rtol=1e-5)


@pytest.mark.parametrize("T", [1, 32, 64, 100, 128, 256, 512, 2048])
@pytest.mark.parametrize(("V", "D"), [(157184, 2048), (1000, 512)])
@pytest.mark.parametrize("draws", [False, True], ids=["greedy", "drawn"])
def test_unembed_stats(T, V, D, draws):
    rng = np.random.default_rng(T)
    x = normal(rng, T, D)
    w = jax.random.normal(jax.random.key(1), (V, D), jnp.bfloat16) * jnp.bfloat16(D**-0.5)
    options = {"forbidden_ids": (3, V - 1), "given_ids": jnp.arange(T, dtype=jnp.int32) % V}
    if draws:
        options["draw_keys"] = jax.random.bits(jax.random.key(2), (T, 2), jnp.uint32)
        options["temperature"] = jnp.where(jnp.arange(T) % 3 > 0, 0.8, 0.0)
    out = pallas_kernels.unembed_stats(x, w, **options, implementation="mosaic_gpu")
    with jax.default_matmul_precision("highest"):
        expected = pallas_kernels.unembed_stats(
            x.astype(jnp.float32), w.astype(jnp.float32), **options, implementation="xla"
        )
    for name in ("best_logit", "second_logit", "logsumexp", "entropy", "given_logit"):
        np.testing.assert_allclose(
            np.asarray(getattr(out, name)), np.asarray(getattr(expected, name)), atol=2e-3,
            err_msg=name,
        )  # fmt: skip
    # The order of float32 sums changes an id only if two logits are nearly equal.
    for name in ("best_id", "second_id", "drawn_id"):
        same = np.asarray(getattr(out, name) == getattr(expected, name)).mean()
        assert same >= 1 - 2 / T, name


@pytest.mark.parametrize("T", [1, 32, 2048])
def test_norms(T):
    rng = np.random.default_rng(T)
    x, first, second = (normal(rng, T, 2048) for _ in range(3))
    weight = normal(rng, 2048)
    total, normed = pallas_kernels.add_rms_norm(
        x, (first, second), weight, eps=EPS, implementation="mosaic_gpu"
    )
    np.testing.assert_array_equal(bits(total), bits(x + (first + second)))
    expected = pallas_kernels.rms_norm(x + (first + second), weight, EPS)
    np.testing.assert_allclose(
        np.asarray(normed, np.float32), np.asarray(expected, np.float32), rtol=2**-6, atol=2**-6
    )


@pytest.mark.parametrize("T", [1, 32, 64, 100, 128])
@pytest.mark.parametrize(
    ("N", "K"), [(12288, 4096), (4096, 12288), (4608, 3584), (2048, 2048), (192, 192)]
)
def test_dense_matmul(T, N, K):
    rng = np.random.default_rng(T)
    x = normal(rng, T, K)
    w = jax.random.normal(jax.random.key(1), (N, K), jnp.bfloat16) * jnp.bfloat16(K**-0.5)
    forced = {"implementation": "mosaic_gpu"}
    parts = pallas_kernels.dense_matmul(x, w, **forced)
    activated = pallas_kernels.swiglu_matmul(x, w, **forced)
    with jax.default_matmul_precision("highest"):
        (expected,) = pallas_kernels.dense_matmul(*wide((x, w)), implementation="xla")
        expected_activated = pallas_kernels.swiglu_matmul(*wide((x, w)), implementation="xla")
    assert relative_error(sum(wide(parts)), expected) < 4e-3
    assert relative_error(activated, expected_activated) < 4e-3
    for part, again in zip(parts, pallas_kernels.dense_matmul(x, w, **forced), strict=True):
        np.testing.assert_array_equal(bits(part), bits(again))
    # A row's bits do not depend on other rows, and NaN stays in its row.
    others = x.at[1:].set(jnp.nan)
    for part, alone in zip(parts, pallas_kernels.dense_matmul(others, w, **forced), strict=True):
        np.testing.assert_array_equal(bits(part[0]), bits(alone[0]))


@pytest.mark.parametrize(
    ("T", "N", "K", "swiglu"),
    [
        (192, 12288, 4096, True),
        (192, 18944, 3584, True),
        (256, 12288, 4096, True),
        (384, 18944, 3584, True),
        (192, 12288, 4096, False),
        (192, 4608, 3584, False),
        (256, 4608, 3584, False),
        (384, 4608, 3584, False),
        (160, 4096, 12288, False),
        (256, 4096, 12288, False),
        (320, 4096, 12288, False),
        (384, 3584, 3584, False),
    ],
)
def test_dense_matmul_of_more_tokens(T, N, K, swiglu):
    """The table's tiles serve whole tiles of tokens and a last tile that is not full."""
    rng = np.random.default_rng(T)
    x = normal(rng, T, K)
    w = jax.random.normal(jax.random.key(1), ((1 + swiglu) * N, K), jnp.bfloat16)
    w *= jnp.bfloat16(K**-0.5)
    op = pallas_kernels.swiglu_matmul if swiglu else pallas_kernels.dense_matmul

    def run(x, **options):
        out = op(x, w, **options)
        return (out,) if swiglu else out

    parts = run(x, implementation="mosaic_gpu")
    w32, x32 = wide((w, x))
    expected = op(x32, w32, implementation="xla")
    expected = expected if swiglu else expected[0]
    assert relative_error(sum(wide(parts)), expected) < 4e-3
    others = x.at[1:].set(jnp.nan)
    for part, alone in zip(parts, run(others, implementation="mosaic_gpu"), strict=True):
        np.testing.assert_array_equal(bits(part[0]), bits(alone[0]))


@pytest.mark.parametrize("D", [512, 3584, 4096])
def test_norm_adds_the_parts_of_a_split_product(D):
    rng = np.random.default_rng(D)
    x, *parts = (normal(rng, 128, D) for _ in range(5))
    weight = normal(rng, D)
    total, normed = pallas_kernels.add_rms_norm(
        x, tuple(parts), weight, eps=EPS, implementation="mosaic_gpu"
    )
    added = functools.reduce(jnp.add, parts)
    np.testing.assert_array_equal(bits(total), bits(x + added))
    expected = pallas_kernels.rms_norm(x + added, weight, EPS)
    np.testing.assert_allclose(
        np.asarray(normed, np.float32), np.asarray(expected, np.float32), rtol=2**-6, atol=2**-6
    )


@pytest.mark.parametrize(("T", "parts"), [(1, 1), (33, 2), (128, 4), (2048, 1)])
@pytest.mark.parametrize(
    ("N", "K", "rotary_dim", "has_bias", "has_norm"),
    [(32, 32, 128, False, False), (28, 4, 128, True, False), (16, 4, 64, False, True)],
    ids=["LLaDA-8B", "Dream-7B", "LLaDA2.0-mini"],
)
def test_rotation_and_write_of_the_pool(T, parts, N, K, rotary_dim, has_bias, has_norm):
    rng = np.random.default_rng(T)
    H, pages, page = 128, 40, 64
    width = (N + 2 * K) * H
    angles = rng.uniform(0, 4000, (T, rotary_dim // 2)).astype(np.float32)
    slots = rng.permutation(pages * page)[:T].astype(np.int32)
    slots[5::7] = pages * page + 3  # padding
    pool = normal(rng, pages, 2, K, page, H)
    arguments = (
        tuple(normal(rng, T, width).at[T // 2].set(jnp.nan) for _ in range(parts)),
        normal(rng, width) if has_bias else None,
        (normal(rng, H), normal(rng, H)) if has_norm else None,
        jnp.cos(angles),
        jnp.sin(angles),
        pool,
        jnp.asarray(slots),
    )
    options = {"num_query_heads": N, "num_kv_heads": K, "eps": EPS}
    before = np.asarray(bits(pool))
    ours, theirs = (
        pallas_kernels.rotate_and_cache(*arguments, **options, implementation=implementation)
        for implementation in ("mosaic_gpu", "xla")
    )
    np.testing.assert_array_equal(bits(pool), before)  # nobody donated it
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-5, atol=2**-5
        )
    # Values are exact (one NaN equals another); places that no token owns keep their bits.
    np.testing.assert_array_equal(
        *(np.asarray(pool[:, 1], np.float32) for _, pool in (ours, theirs))
    )
    unowned = np.setdiff1d(np.arange(pages * page), slots)
    keys = np.moveaxis(bits(ours[1][:, 0]), 2, 1).reshape(pages * page, K, H)
    keys_before = np.moveaxis(before[:, 0], 2, 1).reshape(pages * page, K, H)
    np.testing.assert_array_equal(keys[unowned], keys_before[unowned])
