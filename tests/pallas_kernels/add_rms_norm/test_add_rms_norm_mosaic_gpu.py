"""The fused norm kernel equals its reference up to one rounding, and lowers for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.add_rms_norm import mosaic_gpu
from pallas_kernels.hopper import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import kernel_interpreter

EPS = 1e-6


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def bits(array):
    return np.asarray(array).view(np.uint16)


def assert_within_one_rounding(ours, expected):
    """Asserts equality up to a bf16 rounding before the weight and one after it.

    The two reductions add in different orders, so a value may round to the other side.
    """
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(ours, expected, rtol=2**-6, atol=2**-6)
    assert (ours != expected).mean() < 0.01


def test_add_rms_norm_equals_the_reference():
    x, added, weight = normal(5, 1024), normal(5, 1024, seed=1), normal(1024, seed=2)
    total, normed = kernel_interpreter.run(mosaic_gpu.add_rms_norm, x, (added,), weight, eps=EPS)
    # Op by op: inside one jit XLA may skip a rounding.
    np.testing.assert_array_equal(bits(total), bits(x + added))
    assert_within_one_rounding(normed, pallas_kernels.rms_norm(x + added, weight, EPS))


@pytest.mark.parametrize("width", [1024, 3584], ids=["16-byte-loads", "8-byte-loads"])
@pytest.mark.parametrize("count", [2, 4])
def test_several_additions_round_one_by_one(width, count):
    x, *added = (normal(3, width, seed=seed) for seed in range(count + 1))
    weight = normal(width, seed=9)
    run = functools.partial(kernel_interpreter.run, mosaic_gpu.add_rms_norm, eps=EPS)
    total, normed = run(x, tuple(added), weight)
    expected = x + functools.reduce(jnp.add, added)
    np.testing.assert_array_equal(bits(total), bits(expected))
    assert_within_one_rounding(normed, pallas_kernels.rms_norm(expected, weight, EPS))


@pytest.mark.parametrize("width", [512, 1024])
def test_a_row_of_nan_stays_alone(width):
    x, added, weight = normal(5, width), normal(5, width, seed=1), normal(width, seed=2)
    clean = kernel_interpreter.run(mosaic_gpu.add_rms_norm, x, (added,), weight, eps=EPS)
    dirty = kernel_interpreter.run(
        mosaic_gpu.add_rms_norm, x.at[2].set(jnp.nan), (added,), weight, eps=EPS
    )
    for before, after in zip(clean, dirty, strict=True):
        others = np.arange(5) != 2
        np.testing.assert_array_equal(bits(before)[others], bits(after)[others])
        assert np.isnan(np.asarray(after[2], np.float32)).all()


def test_shapes_that_do_not_fit_are_refused_with_the_shapes():
    with pytest.raises(ValueError, match=r"add_rms_norm: .*added \['float32\(3, 4\)'\]"):
        pallas_kernels.add_rms_norm(jnp.ones((2, 4)), (jnp.ones((3, 4)),), jnp.ones(4), eps=EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: .*added \[\]"):
        pallas_kernels.add_rms_norm(jnp.ones((2, 4)), (), jnp.ones(4), eps=EPS)


@pytest.mark.parametrize("T", [32, 2048, 16384])
@pytest.mark.parametrize("D", [1024, 2048, 3584, 4096])
def test_serving_shapes_lower_for_cuda(T, D):
    def run(x, added, weight):
        return mosaic_gpu.add_rms_norm(x, (added, x), weight, eps=EPS)

    assert mosaic_gpu.why_not(dtype=jnp.bfloat16, width=D) is None
    wide, row = jax.ShapeDtypeStruct((T, D), jnp.bfloat16), jax.ShapeDtypeStruct((D,), jnp.bfloat16)
    traced = jax.jit(run).trace(wide, wide, row)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_the_kernel_cannot_serve_has_a_reason():
    assert "16-bit" in mosaic_gpu.why_not(dtype=jnp.float32, width=1024)
    assert "multiple of 512" in mosaic_gpu.why_not(dtype=jnp.bfloat16, width=1280)
