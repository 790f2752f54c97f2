"""Dense and paged attention against a numpy softmax."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import attention, rope

ATOL = 1e-5


def numpy_attention(q, k, v, mask):
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            scores = k[:, n // group] @ q[t, n] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max()) * mask[t]
            out[t, n] = (weights / weights.sum()) @ v[:, n // group]
    return out


def random_qkv(tokens, rng):
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def projection_of(q, k, v):
    """Returns a projection whose heads are these: no bias, no norms, angles of 0."""
    qkv = np.concatenate([q, k, v], axis=1).reshape(len(q), -1)
    cos = jnp.ones((len(q), q.shape[2] // 2))
    return attention.Projection(
        qkv=(jnp.asarray(qkv),),
        bias=None,
        norm_weights=None,
        rotation=rope.Rotation(cos, jnp.zeros_like(cos)),
        num_query_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        eps=0.0,
    )


def test_visibility_masks_by_hand():
    assert attention.visibility_mask(4, 2, "block_causal").astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
    ]
    assert attention.visibility_mask(2, 2, "causal").tolist() == [[True, False], [True, True]]
    assert attention.visibility_mask(3, 2, "full").all()
    with pytest.raises(ValueError, match="sideways"):
        attention.visibility_mask(3, 2, "sideways")


def test_windows_of_masks_by_hand():
    assert attention.visibility_mask(4, 2, "causal", window=2).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert attention.visibility_mask(3, 2, "full", window=2).astype(int).tolist() == [
        [1, 1, 0],
        [1, 1, 1],
        [0, 1, 1],
    ]
    assert attention.visibility_mask(5, 2, "full", window=9).all()


def test_pages_obey_the_window_and_the_scale_of_a_layer():
    T = 6
    q, k, v = random_qkv(T, np.random.default_rng(3))
    batch = attention.PagedBatch(
        cu_q_lens=np.array([0, T], np.int32),
        context_lens=np.zeros(1, np.int32),
        kv_lens=np.array([T], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        kv_indices=np.arange(T, dtype=np.int32),
    )
    attend = attention.paged_attend(batch, visibility="causal", block_size=2)
    pool = jnp.zeros((1, 2, k.shape[1], T, k.shape[2]))
    for window in (None, 2):
        mask = attention.visibility_mask(T, 2, "causal", window=window)
        for scale in (None, 1.0):
            projection = dataclasses.replace(projection_of(q, k, v), window=window, scale=scale)
            out, _ = attend(projection, pool)
            same = attention.dense_attend(mask, 1, of_windows={2: mask})(projection, None)[0]
            by_scale = 1.0 if scale is None else scale * k.shape[2] ** 0.5
            expected = numpy_attention(np.asarray(q) * by_scale, k, v, mask)
            np.testing.assert_allclose(out, expected, atol=ATOL)
            np.testing.assert_allclose(same, expected, atol=ATOL)


def test_v_may_be_the_raw_projection_of_k_and_be_normalised():
    rng = np.random.default_rng(4)
    D, N, K, H, T = 12, 4, 2, 8, 5
    x = rng.normal(size=(T, D)).astype(np.float32)
    seen = {}

    def attend(projection, cache):
        seen["heads"] = projection.heads()
        return jnp.zeros((T, N, H)), cache

    for shares_kv in (False, True):
        config = attention.AttentionConfig(
            dim=D, num_query_heads=N, num_kv_heads=K, head_dim=H,
            rope=rope.RopeConfig(rotary_dim=H, theta=1e4), qk_norm_eps=1e-6, normalizes_v=True,
            shares_kv=shares_kv,
        )  # fmt: skip
        layer = attention.Attention(config, dtype=jnp.dtype(jnp.float32))
        weight = layer.w_qk if shares_kv else layer.w_qkv
        weight[...] = rng.normal(size=weight.shape).astype(np.float32)
        layer(jnp.asarray(x), rope.rotation(jnp.arange(T), config.rope), attend=attend, cache=None)
        raw = (x @ np.asarray(weight[...]).T)[:, -K * H :].reshape(T, K, H)
        expected = raw / np.sqrt((raw**2).mean(axis=-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(seen["heads"][2], expected, atol=ATOL)


def test_dense_attend_equals_numpy_for_each_sequence():
    q, k, v = random_qkv(12, np.random.default_rng(0))
    mask = attention.visibility_mask(6, 2, "block_causal")
    out, cache = attention.dense_attend(mask, 2)(projection_of(q, k, v), None)
    for rows in (slice(0, 6), slice(6, 12)):
        expected = numpy_attention(q[rows], k[rows], v[rows], mask)
        np.testing.assert_allclose(out[rows], expected, atol=ATOL)
    assert cache is None


def test_dense_attend_takes_one_mask_per_sequence():
    q, k, v = random_qkv(8, np.random.default_rng(1))
    masks = np.stack([np.ones((4, 4), bool), np.tril(np.ones((4, 4), bool))])
    out, _ = attention.dense_attend(masks, 2)(projection_of(q, k, v), None)
    for i, rows in enumerate((slice(0, 4), slice(4, 8))):
        expected = numpy_attention(q[rows], k[rows], v[rows], masks[i])
        np.testing.assert_allclose(out[rows], expected, atol=ATOL)


def test_paged_attend_writes_only_its_slots_and_drops_padding():
    q, k, v = random_qkv(4, np.random.default_rng(2))
    pool = jnp.full((3, 2, 2, 2, 8), 7.0)  # 3 pages of 2 tokens
    batch = attention.PagedBatch(
        cu_q_lens=jnp.array([0, 2], jnp.int32),
        context_lens=jnp.array([0], jnp.int32),
        kv_lens=jnp.array([2], jnp.int32),
        page_table=jnp.array([[2, 0]], jnp.int32),
        kv_indices=jnp.array([4, 5, 6, 6], jnp.int32),  # page 2; then past the pool
    )
    attend = attention.paged_attend(batch, visibility="block_causal", block_size=2)
    out, new_pool = attend(projection_of(q, k, v), pool)
    np.testing.assert_array_equal(new_pool[:2], 7.0)
    np.testing.assert_array_equal(new_pool[2, 0], np.swapaxes(k[:2], 0, 1))
    np.testing.assert_array_equal(new_pool[2, 1], np.swapaxes(v[:2], 0, 1))
    expected = numpy_attention(q[:2], k[:2], v[:2], np.ones((2, 2), bool))
    np.testing.assert_allclose(out[:2], expected, atol=ATOL)
    np.testing.assert_array_equal(out[2:], 0.0)


def test_causal_rows_see_no_later_token_and_other_rows_their_whole_block():
    """Rows of 4 tokens, the last of which a shorter row does not have; contexts of any length."""
    rng = np.random.default_rng(5)
    contexts, lengths, causal = [3, 0, 5, 2], [4, 4, 3, 4], [True, False, True, False]
    q, k, v = random_qkv(16, rng)
    pool = rng.normal(size=(12, 2, 2, 4, 8)).astype(np.float32)  # 3 pages of 4 tokens for each row
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    places = [
        table[r, (contexts[r] + i) // 4] * 4 + (contexts[r] + i) % 4 if i < lengths[r] else 99 + i
        for r in range(4)
        for i in range(4)
    ]
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(5, dtype=jnp.int32) * 4,
        context_lens=jnp.array(contexts, jnp.int32),
        kv_lens=jnp.array(contexts, jnp.int32) + jnp.array(lengths, jnp.int32),
        page_table=jnp.asarray(table),
        kv_indices=jnp.array(places, jnp.int32),
    )
    attend = attention.paged_attend(
        batch, visibility="full", block_size=4, q_len=4, causal_rows=jnp.array(causal)
    )
    out, _ = attend(projection_of(q, k, v), jnp.asarray(pool))
    for r, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        mine = slice(4 * r, 4 * r + length)
        stored = pool[table[r]].transpose(1, 0, 3, 2, 4).reshape(2, 12, 2, 8)[:, :context]
        keys, values = (np.concatenate([old, new[mine]]) for old, new in zip(stored, (k, v)))
        mask = np.ones((length, context + length), bool)
        if causal[r]:
            mask = np.arange(context + length) <= context + np.arange(length)[:, None]
        expected = numpy_attention(q[mine], keys, values, mask)
        np.testing.assert_allclose(out[mine], expected, atol=ATOL)
