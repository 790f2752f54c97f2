"""Group-limited routing equals results by hand: ties, groups, bias; wrong shapes are refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_routing


def route(logits, bias, **changes):
    options = {"experts_per_token": 2, "num_groups": 1, "kept_groups": 1, "scaling_factor": 1.0}
    return top_k_routing(jnp.asarray(logits), jnp.asarray(bias), **(options | changes))


def test_equal_scores_go_to_the_lower_id():
    ids, weights = route(jnp.zeros((1, 8)), jnp.zeros(8), scaling_factor=3.0)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[1.5, 1.5]], rtol=1e-6)
    ids, _ = route(jnp.zeros((1, 8)), jnp.zeros(8), num_groups=4, kept_groups=2)
    assert ids.tolist() == [[0, 1]]


def test_the_bias_selects_but_does_not_weigh():
    logits = jnp.array([[0.0, 0.0, 2.0, -1.0, 0.0, 0.0, 0.0, 0.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    ids, weights = route(logits, bias)
    assert ids.tolist() == [[3, 2]]
    low, high = 1 / (1 + np.e), 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(weights[0], [low / (low + high), high / (low + high)], rtol=1e-5)


def test_a_negative_bias_does_not_resurrect_a_dropped_group():
    # Groups {0,1}, {2,3}; group 0 wins though all its choice scores are negative.
    ids, _ = route(
        jnp.zeros((1, 4)), jnp.array([-2.0, -2.0, -9.0, -9.0]), num_groups=2, kept_groups=1
    )
    assert ids.tolist() == [[0, 1]]


def test_a_group_counts_by_its_two_best_experts():
    # Group 0 has the best single expert, group 1 the best pair.
    ids, _ = route(jnp.zeros((1, 4)), jnp.array([3.0, -9.0, 1.0, 1.0]), num_groups=2, kept_groups=1)
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_routing_equals_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    T, E, k, groups, kept = 12, 32, 4, 4, 2
    logits = rng.normal(size=(T, E)).astype(np.float32)
    bias = rng.normal(size=E).astype(np.float32)
    ids, weights = route(
        logits, bias, experts_per_token=k, num_groups=groups, kept_groups=kept, scaling_factor=2.5
    )
    for t in range(T):
        scores = 1 / (1 + np.exp(-logits[t].astype(np.float64)))
        choice = scores + bias
        by_group = choice.reshape(groups, -1)
        group_score = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
        dropped = np.argsort(-group_score, kind="stable")[kept:]
        by_group[dropped] = -np.inf
        expected = np.argsort(-choice, kind="stable")[:k]
        assert ids[t].tolist() == expected.tolist()
        np.testing.assert_allclose(
            weights[t], 2.5 * scores[expected] / scores[expected].sum(), rtol=1e-5
        )


@pytest.mark.parametrize("renormalizes", [True, False])
def test_softmax_routing_equals_a_loop_over_tokens(renormalizes):
    rng = np.random.default_rng(9)
    T, E, k = 12, 32, 4
    logits = 3 * rng.normal(size=(T, E)).astype(np.float32)
    options = {"experts_per_token": k, "scores": "softmax", "renormalizes": renormalizes}
    ids, weights = top_k_routing(jnp.asarray(logits), None, **options)
    for t in range(T):
        score = np.exp(logits[t].astype(np.float64))
        score /= score.sum()
        expected = np.argsort(-score, kind="stable")[:k]
        assert ids[t].tolist() == expected.tolist()
        whole = score[expected].sum() if renormalizes else 1.0
        np.testing.assert_allclose(weights[t], score[expected] / whole, rtol=1e-5)


def test_softmax_scores_have_neither_bias_nor_groups():
    for bias, groups in ((jnp.zeros(8), 1), (None, 2)):
        with pytest.raises(ValueError, match="neither bias nor groups"):
            top_k_routing(
                jnp.zeros((2, 8)), bias, experts_per_token=2, num_groups=groups, scores="softmax"
            )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "divide the experts"),
        ({"num_groups": 4, "kept_groups": 5}, "kept_groups"),
        ({"num_groups": 4, "kept_groups": 1, "experts_per_token": 3}, "than the kept groups hold"),
        ({"experts_per_token": 0}, "than the kept groups hold"),
        ({"num_groups": 8, "experts_per_token": 1}, "at least two experts"),
    ],
)
def test_impossible_routing_is_refused_with_its_shapes(changes, message):
    with pytest.raises(ValueError, match=rf"{message}.*\(4, 8\)"):
        route(np.zeros((4, 8), np.float32), np.zeros(8, np.float32), **changes)


def test_wrong_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32 \\[T, E\\]"):
        route(np.zeros((4, 8), np.float16), np.zeros(8, np.float32))
