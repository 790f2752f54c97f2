"""Vocabulary statistics equal float64 numpy over the whole row of logits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnembedStats, penalize, probability, unembed_stats
from pallas_kernels.unembed_stats import partials

T, D, V = 6, 8, 50
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of 50 terms


def oracle(logits, forbidden=(), given=None) -> dict[str, np.ndarray]:
    rows = []
    for t, z in enumerate(np.asarray(logits, np.float64)):
        allowed = sorted((i for i in range(len(z)) if i not in forbidden), key=lambda i: (-z[i], i))
        p = np.exp(z - z.max())
        log_total = np.log(p.sum())
        p /= p.sum()
        rows.append({
            "best_id": allowed[0],
            "best_logit": z[allowed[0]],
            "second_id": allowed[1],
            "second_logit": z[allowed[1]],
            "logsumexp": z.max() + log_total,
            "entropy": -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)),
            "given_logit": 0.0 if given is None else z[given[t]],
        })  # fmt: skip
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def check(stats, expected, **tolerance) -> None:
    for name, value in expected.items():
        found = np.asarray(getattr(stats, name))
        if name.endswith("_id"):
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, value, err_msg=name)
        else:
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, value, **(tolerance or TOLERANCE), err_msg=name)


def identity_case(logits) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and w with exactly `logits` [T, V] as product: one-hot rows pick a column of w."""
    logits = np.asarray(logits, np.float32)
    return np.eye(len(logits), dtype=np.float32), logits.T.copy()


@pytest.mark.parametrize("chunk", [50, 16, 25, 7, 8192, None])
def test_equals_numpy(chunk):
    rng = np.random.default_rng(chunk)
    x = rng.normal(size=(T, D)).astype(np.float32)
    w = rng.normal(size=(V, D)).astype(np.float32)
    given = rng.integers(0, V, T).astype(np.int32)
    given[:2] = 0, V - 1
    forbidden = (3, 49, 17)
    stats = unembed_stats(x, w, forbidden_ids=forbidden, given_ids=given, chunk_size=chunk)
    logits = x.astype(np.float64) @ w.T.astype(np.float64)
    check(stats, oracle(logits, forbidden, given))


def test_ties_go_to_the_lowest_id_within_and_across_chunks():
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.integers(0, 4, (T, V))  # dozens of ties in every row
        stats = unembed_stats(*identity_case(logits), forbidden_ids=(0, 31), chunk_size=16)
        check(stats, oracle(logits, (0, 31)))


def test_all_equal_logits():
    stats = unembed_stats(*identity_case(np.zeros((T, V))), chunk_size=16)
    np.testing.assert_array_equal(stats.best_id, np.zeros(T))
    np.testing.assert_array_equal(stats.second_id, np.ones(T))
    np.testing.assert_allclose(stats.entropy, np.full(T, np.log(V)), rtol=1e-6)


@pytest.mark.parametrize("forbidden", [(), tuple(range(16)), tuple(range(48)), (49, 48, 2)])
def test_forbidden_ids_are_never_best_or_second(forbidden):
    """A whole chunk, all ids but two, or the top ids are forbidden; their mass still counts."""
    logits = np.random.default_rng(1).normal(size=(T, V))
    logits[:, list(forbidden)] += 20
    stats = unembed_stats(*identity_case(logits), forbidden_ids=forbidden, chunk_size=16)
    check(stats, oracle(np.float32(logits), forbidden))


def test_large_shifts_keep_entropy_and_probability():
    logits = np.random.default_rng(2).integers(-8, 8, (T, V)) / 2  # exact at 1e6 in float32
    plain = unembed_stats(*identity_case(logits), chunk_size=16)
    for shift in (1e6, -1e6):
        moved = unembed_stats(*identity_case(logits + shift), chunk_size=16)
        np.testing.assert_array_equal(moved.best_id, plain.best_id)
        np.testing.assert_array_equal(moved.second_id, plain.second_id)
        np.testing.assert_array_equal(moved.best_logit, plain.best_logit + shift)
        np.testing.assert_array_equal(moved.entropy, plain.entropy)
        np.testing.assert_allclose(moved.logsumexp, plain.logsumexp + shift, rtol=1e-7)


def test_one_certain_id_has_zero_entropy():
    logits = np.zeros((1, V))
    logits[0, 20] = 500
    stats = unembed_stats(*identity_case(logits), chunk_size=16)
    assert stats.best_id[0] == 20
    assert stats.entropy[0] == 0
    assert probability(stats.best_logit, stats.logsumexp)[0] == 1


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(T, D)).astype(np.float32)
    w = rng.normal(size=(V, D)).astype(np.float32)
    alone = x.copy()
    alone[1:] = np.nan
    mine = unembed_stats(x, w, chunk_size=16)
    other = unembed_stats(alone, w, chunk_size=16)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_neither_logits_nor_a_copy_of_the_weights_is_materialised():
    """The weights are float32: for bfloat16 XLA:CPU itself keeps a float32 copy, a GPU does not."""
    tokens, width, vocab = 64, 64, 20_011
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    w = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    compiled = jax.jit(functools.partial(unembed_stats, chunk_size=512)).lower(x, w).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < vocab * width * 4 / 4  # a quarter of w
    assert temporary < tokens * vocab * 4 / 4  # a quarter of the logits


def test_bfloat16_inputs_give_float32_statistics():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(T, D)).astype(jnp.bfloat16)
    w = rng.normal(size=(V, D)).astype(jnp.bfloat16)
    logits = x.astype(np.float64) @ w.T.astype(np.float64)
    check(unembed_stats(x, w, chunk_size=16), oracle(logits))


def penalized_oracle(logits, forbidden, given, penalty) -> dict[str, np.ndarray]:
    changed = np.asarray(logits, np.float64).copy()
    changed[np.arange(len(given)), given] -= penalty
    return oracle(changed, forbidden, given)


@pytest.mark.parametrize("forbidden", [(), (5, 12)], ids=["free", "forbidden"])
def test_penalty_equals_changed_logits(forbidden):
    rng = np.random.default_rng(5)
    for draw in range(10):
        logits = rng.integers(-6, 7, (T, V)).astype(np.float32)  # ties after the penalty too
        before = oracle(logits, forbidden)
        given = np.where(rng.random(T) < 0.6, before["best_id"], rng.integers(0, V, T))
        given = given.astype(np.int32)
        if draw == 0 and forbidden:
            given[:] = 5
        penalty = rng.integers(0, 4, T).astype(np.float32)
        x, w = identity_case(logits)
        stats = unembed_stats(x, w, forbidden_ids=forbidden, given_ids=given, chunk_size=16)
        stats = jax.jit(penalize)(stats, given, penalty)
        expected = penalized_oracle(logits, forbidden, given, penalty)
        exact = ("best_id", "best_logit", "logsumexp", "given_logit")
        check(stats, {name: expected[name] for name in exact})


def test_zero_penalty_changes_no_bit():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(T, D)).astype(np.float32)
    w = rng.normal(size=(V, D)).astype(np.float32)
    given = np.argmax(x @ w.T, axis=1).astype(np.int32)
    stats = unembed_stats(x, w, given_ids=given, chunk_size=16)
    for a, b in zip(
        jax.tree.leaves(stats), jax.tree.leaves(penalize(stats, given, np.zeros(T))), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize("penalty", [2.0, 40.0, 1e4])
def test_penalty_on_a_certain_id_stays_finite(penalty):
    """All the mass is on the given id, so the rest must come from the second best."""
    logits = np.full((1, V), -80.0)
    logits[0, 9], logits[0, 30] = 33.0, 3.0
    x, w = identity_case(logits)
    given = np.array([9], np.int32)
    stats = unembed_stats(x, w, given_ids=given, chunk_size=16)
    after = penalize(stats, given, np.array([penalty], np.float32))
    expected = penalized_oracle(logits, (), given, penalty)
    np.testing.assert_array_equal(after.best_id, expected["best_id"])
    np.testing.assert_allclose(after.best_logit, expected["best_logit"], rtol=1e-6)
    np.testing.assert_allclose(after.logsumexp, expected["logsumexp"], rtol=1e-5)
    assert 0 <= probability(after.best_logit, after.logsumexp)[0] <= 1


@pytest.mark.parametrize("num_rows", [-1, 0, 1, 4, T, 2**31 - 1])
def test_rows_behind_num_rows_are_zero_and_no_other_changes(num_rows):
    rng = np.random.default_rng(12)
    x = rng.normal(size=(T, D)).astype(np.float32)
    x[4] = np.nan
    w = rng.normal(size=(V, D)).astype(np.float32)
    options = {
        "given_ids": jnp.arange(T, dtype=jnp.int32), "draw_keys": sequential_keys(T),
        "temperature": jnp.ones(T),
    }  # fmt: skip
    every = unembed_stats(x, w, **options)
    some = unembed_stats(x, w, **options, num_rows=jnp.int32(num_rows))
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(every), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, np.where(np.arange(T) < num_rows, b, 0))


def test_stats_are_a_pytree_of_rows():
    stats = unembed_stats(*identity_case(np.zeros((T, V))), chunk_size=16)
    assert isinstance(jax.tree.map(lambda a: a[:2], stats), UnembedStats)
    assert {leaf.shape for leaf in jax.tree.leaves(stats)} == {(T,)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"w": jnp.zeros((V, D + 1))}, r"w \[V, D\]"),
        ({"w": jnp.zeros((V, D), jnp.bfloat16)}, "one dtype"),
        ({"forbidden_ids": (V,)}, "forbidden ids must lie"),
        ({"forbidden_ids": tuple(range(V - 1))}, "at least two ids"),
        ({"given_ids": jnp.zeros(T + 1, jnp.int32)}, "given_ids must be"),
        ({"temperature": jnp.zeros(T + 1)}, "temperature must be"),
        ({"draw_keys": jnp.zeros((T, 2), jnp.int32)}, r"draw_keys must be uint32 \[T, 2\]"),
        ({"x": jnp.zeros((0, D))}, "at least one row"),
        ({"num_rows": jnp.ones(1, jnp.int32)}, "num_rows must be an int32 scalar"),
        ({"num_rows": jnp.float32(1)}, "num_rows must be an int32 scalar"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        unembed_stats(**({"x": jnp.zeros((T, D)), "w": jnp.zeros((V, D))} | arguments))


PARTS = 5


def partials_of(logits, keys, temperature) -> list[partials.PartialStats]:
    """Returns the statistics of consecutive ranges of ids, computed in numpy."""
    first, second = partials.draw_words(keys)
    T, V = logits.shape
    scores = logits / temperature[:, None] + np.asarray(
        partials.noise(partials.draw_counter(first[:, None], jnp.arange(V)), second[:, None])
    )
    found = []
    for ids in np.array_split(np.arange(V), PARTS):
        z = logits[:, ids]
        order = np.argsort(-z, axis=1, kind="stable")
        rows = np.arange(T)
        high = z.max(axis=1)
        weight = np.exp(z - high[:, None])
        drawn = scores[:, ids].argmax(axis=1)
        found.append(
            partials.PartialStats(
                high=high,
                total=weight.sum(axis=1),
                moment=(weight * (z - high[:, None])).sum(axis=1),
                best_id=ids[order[:, 0]].astype(np.int32),
                best_logit=z[rows, order[:, 0]],
                second_id=ids[order[:, 1]].astype(np.int32),
                second_logit=z[rows, order[:, 1]],
                given_logit=z[:, 0] * (ids[0] == 0),
                drawn_score=scores[rows, ids[drawn]],
                drawn_id=ids[drawn].astype(np.int32),
                drawn_logit=logits[rows, ids[drawn]],
            )
        )
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(PARTS)))[::17])
def test_merging_in_any_order_and_grouping_gives_the_same(order):
    """Despite dozens of ties, ids and logits are equal in every bit, sums up to rounding."""
    rng = np.random.default_rng(7)
    logits = rng.integers(0, 4, (T, V)).astype(np.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (T, 2)), jnp.uint32)
    parts = partials_of(logits, keys, np.ones(T, np.float32))
    merge = partials.merge
    expected = functools.reduce(merge, parts)
    a, b, c, d, e = (parts[i] for i in order)
    start = partials.empty((T,), draws=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=-1), a, b, c, d, e)
    for found in (
        merge(merge(merge(merge(a, b), c), d), e),
        merge(a, merge(b, merge(c, merge(d, e)))),
        merge(merge(start, merge(a, b)), merge(merge(c, d), merge(e, start))),
        partials.merge_all(stacked),
    ):
        for name in partials.PartialStats.__dataclass_fields__:
            compare = np.testing.assert_array_equal
            if name in ("total", "moment"):
                compare = functools.partial(np.testing.assert_allclose, rtol=1e-5)
            compare(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(expected.best_id, oracle(logits)["best_id"])
    np.testing.assert_array_equal(expected.second_id, oracle(logits)["second_id"])


def draw(logits, keys, temperature, **options):
    temperature = jnp.broadcast_to(jnp.float32(temperature), len(logits))
    return unembed_stats(*identity_case(logits), draw_keys=keys, temperature=temperature, **options)


def sequential_keys(T) -> jax.Array:
    """Returns neighbouring keys, like those of one request's positions: the hardest for a hash."""
    return jnp.stack([jnp.full(T, 42, jnp.uint32), jnp.arange(T, dtype=jnp.uint32)], axis=1)


def test_draws_follow_the_tempered_softmax():
    """Chi-square over 20000 draws of 10 allowed ids: 40 is far past p = 1e-4."""
    draws, ids, temperature = 20_000, 12, 1.7
    row = np.random.default_rng(8).normal(size=ids) * 1.5
    w = np.asarray(row, np.float32)[:, None]
    stats = unembed_stats(
        np.ones((draws, 1), np.float32),
        w,
        forbidden_ids=(2, 11),
        draw_keys=sequential_keys(draws),
        temperature=jnp.full(draws, temperature, jnp.float32),
    )
    counts = np.bincount(stats.drawn_id, minlength=ids)
    p = np.exp(row / temperature)
    p[[2, 11]] = 0
    expected = draws * p / p.sum()
    assert counts[[2, 11]].sum() == 0
    kept = expected > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 40
    np.testing.assert_array_equal(stats.drawn_logit, np.float32(row)[stats.drawn_id])


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_uniform_and_uncorrelated(axis):
    """exp(-exp(-noise)) is uniform: 64 bins of 2**18 values, and no correlation of neighbours."""
    count = 2**18
    counter = jnp.arange(count, dtype=jnp.uint32)
    fixed = jnp.full(count, 7, jnp.uint32)
    keys = {"ids": (fixed, fixed), "positions": (fixed, counter), "seeds": (counter, fixed)}[axis]
    first, second = partials.draw_words(jnp.stack(keys, axis=1))
    ids = counter if axis == "ids" else fixed
    noise = np.asarray(partials.noise(partials.draw_counter(first, ids), second), np.float64)
    assert np.isfinite(noise).all()
    uniform = np.exp(-np.exp(-noise))
    counts = np.histogram(uniform, bins=64, range=(0, 1))[0]
    assert ((counts - count / 64) ** 2 / (count / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    for lag in (1, 2, 64):
        correlation = np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(count)


def test_a_draw_depends_on_its_key_and_logits_alone():
    """It does not depend on the chunk, the row, or the neighbours and their number."""
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(T, V)).astype(np.float32)
    keys = sequential_keys(T)
    whole = draw(logits, keys, 1.5, chunk_size=V)
    for chunk in (7, 16):
        np.testing.assert_array_equal(
            draw(logits, keys, 1.5, chunk_size=chunk).drawn_id, whole.drawn_id
        )
    back = draw(logits[::-1], keys[::-1], 1.5)
    np.testing.assert_array_equal(back.drawn_id[::-1], whole.drawn_id)
    alone = draw(logits[2:3], keys[2:3], 1.5)
    assert alone.drawn_id[0] == whole.drawn_id[2]
    others = draw(logits, keys + jnp.uint32(1), 1.5)
    assert (others.drawn_id != whole.drawn_id).any()


def test_cold_rows_and_calls_without_keys_take_the_best_id():
    rng = np.random.default_rng(10)
    logits = rng.normal(size=(T, V)).astype(np.float32)
    cold = np.where(np.arange(T) % 2, 1.5, [0.0, -1.0, -0.0] * 2).astype(np.float32)
    stats = draw(logits, sequential_keys(T), cold)
    np.testing.assert_array_equal(stats.drawn_id[::2], stats.best_id[::2])
    np.testing.assert_array_equal(stats.drawn_logit[::2], stats.best_logit[::2])
    assert (stats.drawn_id[1::2] != stats.best_id[1::2]).any()
    greedy = unembed_stats(*identity_case(logits))
    np.testing.assert_array_equal(greedy.drawn_id, greedy.best_id)
    np.testing.assert_array_equal(greedy.drawn_logit, greedy.best_logit)


def test_a_nan_row_is_nan_and_no_other_is():
    logits = np.random.default_rng(11).normal(size=(T, V))
    x, w = identity_case(logits)
    x[2] = np.nan
    stats = unembed_stats(x, w, draw_keys=sequential_keys(T), temperature=jnp.ones(T))
    for name in UnembedStats.__dataclass_fields__:
        value = np.asarray(getattr(stats, name))
        if name.endswith("_id"):
            assert value[2] == 0
        else:
            np.testing.assert_array_equal(np.isnan(value), np.arange(T) == 2, err_msg=name)
