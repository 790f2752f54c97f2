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
