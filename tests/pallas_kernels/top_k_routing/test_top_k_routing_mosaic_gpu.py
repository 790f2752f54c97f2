"""The routing kernel equals the XLA implementation, thread by thread, and lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_routing
from pallas_kernels.hopper import compat, lane_code
from pallas_kernels.top_k_routing import mosaic_gpu
from pallas_kernels.top_k_routing.mosaic_gpu import Rule

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support.lane_interpreter import run_threads

PUBLISHED = {"experts_per_token": 8, "num_groups": 8, "kept_groups": 4, "scaling_factor": 2.5}


def random_router(T, E, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(T, E)).astype(np.float32)
    bias = rng.normal(size=E).astype(np.float32) * 0.1
    logits[:, 5], bias[5] = logits[:, 3], bias[3]  # a tie in every row
    return jnp.asarray(logits), jnp.asarray(bias)


def routed(logits, bias, **options):
    """Returns what the kernel's threads write, in numpy."""
    T, E = logits.shape
    k = options["experts_per_token"]
    rule = Rule(tokens=T, num_experts=E, **options)
    ids, weights = np.full(T * k, -1, np.int32), np.full(T * k, np.nan, np.float32)
    arrays = [np.array(logits).reshape(-1), ids.view(np.uint32), weights]
    if bias is not None:
        arrays.insert(1, np.array(bias))

    def emit(refs, _, scalars):
        logits, *shift, ids, weights = refs
        shift = shift[0] if shift else None
        mosaic_gpu.route_token(logits, shift, ids, weights, lane_code.scalar(*scalars), rule)

    with np.errstate(all="ignore"):
        for cta in range(-(-T // 4)):
            run_threads(emit, arrays, scalars=[[cta]], warps=4)
    return ids.reshape(T, k), weights.reshape(T, k)


@pytest.mark.parametrize(
    ("T", "E", "options"),
    [
        (3, 128, PUBLISHED | {"experts_per_token": 4}),
        (5, 256, PUBLISHED),
        (2, 384, PUBLISHED | {"num_groups": 4, "kept_groups": 2}),
        (2, 1024, PUBLISHED | {"num_groups": 32}),
        (1, 256, {"experts_per_token": 32, "num_groups": 2, "kept_groups": 1}),
        (2, 128, {"experts_per_token": 8, "num_groups": 1, "kept_groups": 1}),
        (2, 128, {"experts_per_token": 2, "num_groups": 2, "kept_groups": 1}),
    ],
)
def test_kernel_equals_the_xla_implementation(T, E, options):
    logits, bias = random_router(T, E)
    options = {"scaling_factor": 1.0} | options
    ids, weights = routed(logits, bias, **options)
    expected_ids, expected_weights = top_k_routing(logits, bias, **options, implementation="xla")
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)


@pytest.mark.parametrize(("T", "E", "k"), [(3, 128, 8), (2, 256, 4), (1, 128, 32)])
def test_kernel_equals_the_xla_implementation_with_softmax_scores(T, E, k):
    logits, _ = random_router(T, E)
    options = {"experts_per_token": k, "num_groups": 1, "kept_groups": 1, "scaling_factor": 1.5}
    options |= {"scores": "softmax"}
    ids, weights = routed(20 * logits, None, **options)
    expected = top_k_routing(20 * logits, None, **options, implementation="xla")
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5, atol=1e-9)


def test_equal_scores_go_to_the_lower_id_and_the_first_groups():
    logits, bias = np.zeros((1, 256), np.float32), np.zeros(256, np.float32)
    ids, _ = routed(logits, bias, **PUBLISHED)
    assert ids.tolist() == [list(range(8))]


def test_a_row_of_nan_leaves_its_neighbours_alone():
    logits, bias = random_router(4, 128)
    ids, weights = routed(logits, bias, **PUBLISHED)
    other_ids, other_weights = routed(logits.at[2].set(jnp.nan), bias, **PUBLISHED)
    others = np.arange(4) != 2
    np.testing.assert_array_equal(ids[others], other_ids[others])
    np.testing.assert_array_equal(weights[others], other_weights[others])
    assert np.all((other_ids >= 0) & (other_ids < 128))


@pytest.mark.parametrize("tokens", [32, 2048, 16384])
@pytest.mark.parametrize(("num_experts", "num_groups"), [(256, 8), (128, 1), (384, 4)])
def test_serving_shapes_lower_for_cuda(tokens, num_experts, num_groups):
    def run(logits, bias):
        return mosaic_gpu.top_k_routing(
            logits, bias, experts_per_token=8, num_groups=num_groups,
            kept_groups=max(1, num_groups // 2), scaling_factor=2.5,
        )  # fmt: skip

    assert mosaic_gpu.why_not(num_experts=num_experts) is None
    shapes = (
        jax.ShapeDtypeStruct((tokens, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((num_experts,), jnp.float32),
    )
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_softmax_scores_lower_for_cuda():
    def run(logits):
        return mosaic_gpu.top_k_routing(
            logits, None, experts_per_token=8, num_groups=1, kept_groups=1, scaling_factor=1.0,
            scores="softmax",
        )  # fmt: skip

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    lowered = jax.jit(run).trace(shape).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_the_kernel_cannot_route_has_a_reason():
    assert "multiple of 128" in mosaic_gpu.why_not(num_experts=64)
    assert "at most 1024" in mosaic_gpu.why_not(num_experts=2048)
    assert "must divide 32" in mosaic_gpu.why_not(num_experts=384, num_groups=3)
    assert "not renormalised" in mosaic_gpu.why_not(num_experts=128, renormalizes=False)
    assert "at most 32" in mosaic_gpu.why_not(num_experts=384, experts_per_token=33)
    with pytest.raises(ValueError, match=r"num_groups=3.*\(2, 384\)"):
        mosaic_gpu.top_k_routing(
            *random_router(2, 384), **PUBLISHED | {"num_groups": 3, "kept_groups": 1}
        )
