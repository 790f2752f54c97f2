"""The router against the reference gate, and its ties and groups by hand."""

import pathlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def published_blocks():
    router = moe.Router(
        64,
        config(
            num_experts=256, experts_per_token=8, scaling_factor=2.5, block_size=32,
            block_capacity=48,
        ),
    )  # fmt: skip
    router.weight[...] = jnp.asarray(load("weight").T)
    router.expert_bias[...] = jnp.asarray(load("expert_bias"))
    return router


def test_routing_by_blocks_equals_the_reference_at_published_geometry():
    ids, weights = published_blocks()(jnp.asarray(load("hidden")))
    np.testing.assert_array_equal(ids, load("block_topk_idx"))
    expected = 2.5 * load("block_topk_weight_unscaled")
    np.testing.assert_allclose(weights, expected, atol=ATOL, rtol=RTOL)


def test_padding_has_no_say_in_the_experts_of_a_block_and_the_last_block_may_be_short():
    router, hidden = published_blocks(), load("hidden")
    alone = router(jnp.asarray(hidden[:20]))
    padded = router(jnp.asarray(hidden[:32]), jnp.arange(32) < 20)
    np.testing.assert_array_equal(padded[0][:20], alone[0])
    assert not np.array_equal(router(jnp.asarray(hidden[:32]))[0][:20], alone[0])
    # By hand: a block reaches the experts that any of its tokens scores highest.
    logits = np.asarray(router.logits(jnp.asarray(hidden[:20])), np.float64)
    best = (1 / (1 + np.exp(-logits)) + load("expert_bias")).max(axis=0)
    assert set(np.unique(alone[0])) <= set(np.argsort(-best, kind="stable")[:48].tolist())


def test_split_weights_keep_the_router_in_float32_precision():
    rng = np.random.default_rng(0)
    router = moe.Router(256, config(num_experts=32))
    router.weight[...] = jnp.asarray(rng.normal(size=(256, 32)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 256)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(router.weight[...], np.float64)
    router.weight = nnx.Param(moe.split_router_weight(router.weight[...]))
    logits = router.logits(x)
    assert logits.dtype == jnp.float32
    # float32 sums of 256 terms of size 1; one bfloat16 product alone would be off by 1e-1.
    np.testing.assert_allclose(logits, exact, atol=2e-5)
