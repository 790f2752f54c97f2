"""The router against the reference gate, and its ties and groups by hand."""

import pathlib

import jax.numpy as jnp
import numpy as np

from jdllm.layers import moe

ROUTING = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2_routing"
ATOL, RTOL = 2e-4, 1e-4


def config(**changes):
    defaults = {
        "num_experts": 8,
        "experts_per_token": 2,
        "num_groups": 1,
        "kept_groups": 1,
        "scaling_factor": 1.0,
    }
    return moe.RouterConfig(**(defaults | changes))


def load(name):
    return np.load(ROUTING / f"{name}.npy")


def test_routing_equals_the_reference_gate_at_published_geometry():
    published = config(
        num_experts=256, experts_per_token=8, num_groups=8, kept_groups=4, scaling_factor=2.5
    )
    router = moe.Router(64, published)
    router.weight[...] = jnp.asarray(load("weight").T)
    router.expert_bias[...] = jnp.asarray(load("expert_bias"))
    hidden = jnp.asarray(load("hidden"))
    logits = router.logits(hidden)
    np.testing.assert_allclose(logits, load("router_logits"), atol=ATOL, rtol=RTOL)
    ids, weights = router(hidden)
    expected_ids, expected_weights = load("topk_idx"), load("topk_weight")
    for t in range(64):
        ours = dict(zip(ids[t].tolist(), weights[t].tolist()))
        expected = dict(zip(expected_ids[t].tolist(), expected_weights[t].tolist()))
        assert ours.keys() == expected.keys()
        for expert, weight in expected.items():
            np.testing.assert_allclose(ours[expert], weight, atol=ATOL, rtol=RTOL)


def test_equal_scores_go_to_the_lower_id():
    ids, weights = moe.route(jnp.zeros((1, 8)), jnp.zeros(8), config(scaling_factor=3.0))
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[1.5, 1.5]], rtol=1e-6)
    ids, _ = moe.route(jnp.zeros((1, 8)), jnp.zeros(8), config(num_groups=4, kept_groups=2))
    assert ids.tolist() == [[0, 1]]


def test_the_bias_selects_but_does_not_weigh():
    logits = jnp.array([[0.0, 0.0, 2.0, -1.0, 0.0, 0.0, 0.0, 0.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    ids, weights = moe.route(logits, bias, config())
    assert ids.tolist() == [[3, 2]]
    low, high = 1 / (1 + np.e), 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(weights[0], [low / (low + high), high / (low + high)], rtol=1e-5)


def test_a_negative_bias_does_not_resurrect_a_dropped_group():
    # Groups {0,1}, {2,3}; group 0 wins though all its choice scores are negative.
    limited = config(num_experts=4, num_groups=2, kept_groups=1)
    ids, _ = moe.route(jnp.zeros((1, 4)), jnp.array([-2.0, -2.0, -9.0, -9.0]), limited)
    assert ids.tolist() == [[0, 1]]


def test_a_group_counts_by_its_two_best_experts():
    # Group 0 has the best single expert, group 1 the best pair.
    limited = config(num_experts=4, num_groups=2, kept_groups=1)
    ids, _ = moe.route(jnp.zeros((1, 4)), jnp.array([3.0, -9.0, 1.0, 1.0]), limited)
    assert ids.tolist() == [[2, 3]]
