"""The routing kernel equals the XLA implementation in the interpreter and lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_routing
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu import top_k_routing as gpu_kernel

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

import kernel_interpreter

PUBLISHED = {"experts_per_token": 8, "num_groups": 8, "kept_groups": 4, "scaling_factor": 2.5}


def random_router(T, E, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(T, E)).astype(np.float32)
    bias = rng.normal(size=E).astype(np.float32) * 0.1
    logits[:, 5], bias[5] = logits[:, 3], bias[3]  # a tie in every row
    return jnp.asarray(logits), jnp.asarray(bias)


def interpreted(logits, bias, **options):
    return kernel_interpreter.run(gpu_kernel.top_k_routing, logits, bias, **options)


@pytest.mark.parametrize(
    ("T", "E", "options"),
    [
        (3, 128, PUBLISHED | {"experts_per_token": 4}),
        (5, 256, PUBLISHED),
        (2, 128, {"experts_per_token": 8, "num_groups": 1, "kept_groups": 1}),
        (2, 128, {"experts_per_token": 2, "num_groups": 2, "kept_groups": 1}),
    ],
)
def test_kernel_equals_the_xla_implementation(T, E, options):
    logits, bias = random_router(T, E)
    options = {"scaling_factor": 1.0} | options
    ids, weights = interpreted(logits, bias, **options)
    expected_ids, expected_weights = top_k_routing(logits, bias, **options, implementation="xla")
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)


def test_a_row_of_nan_leaves_its_neighbours_alone():
    logits, bias = random_router(4, 128)
    ids, weights = interpreted(logits, bias, **PUBLISHED)
    other_ids, other_weights = interpreted(logits.at[2].set(jnp.nan), bias, **PUBLISHED)
    others = np.arange(4) != 2
    np.testing.assert_array_equal(ids[others], other_ids[others])
    np.testing.assert_array_equal(weights[others], other_weights[others])


@pytest.mark.parametrize("tokens", [32, 2048, 16384])
@pytest.mark.parametrize(("num_experts", "num_groups"), [(256, 8), (128, 1), (384, 4)])
def test_serving_shapes_lower_for_cuda(tokens, num_experts, num_groups):
    def run(logits, bias):
        return gpu_kernel.top_k_routing(
            logits, bias, experts_per_token=8, num_groups=num_groups,
            kept_groups=max(1, num_groups // 2), scaling_factor=2.5,
        )  # fmt: skip

    assert gpu_kernel.why_not(num_experts=num_experts) is None
    shapes = (
        jax.ShapeDtypeStruct((tokens, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((num_experts,), jnp.float32),
    )
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_the_kernel_cannot_route_has_a_reason():
    assert "multiple of 128" in gpu_kernel.why_not(num_experts=64)
    assert "at most 1024" in gpu_kernel.why_not(num_experts=2048)
