"""The fused norm and rotation kernels equal their references to a rounding; they lower for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu import qk_norm_rope as qk_kernel
from pallas_kernels.mosaic_gpu import rms_norm as norm_kernel

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

import kernel_interpreter

EPS = 1e-6


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def bits(array):
    return np.asarray(array).view(np.uint16)


def assert_within_one_rounding(ours, expected):
    """Reductions add in another order: a value may fall on the other side of a bf16 rounding,

    before the weight and after it, and a rotation subtracts such values of order one.
    """
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(ours, expected, rtol=2**-6, atol=2**-6)
    assert (ours != expected).mean() < 0.01


def test_add_rms_norm_equals_the_reference():
    x, added, weight = normal(5, 1024), normal(5, 1024, seed=1), normal(1024, seed=2)
    total, normed = kernel_interpreter.run(norm_kernel.add_rms_norm, x, (added,), weight, eps=EPS)
    # Op by op: inside one jit XLA may keep the excess precision of a rounded value.
    np.testing.assert_array_equal(bits(total), bits(x + added))
    assert_within_one_rounding(normed, pallas_kernels.rms_norm(x + added, weight, EPS))


def test_several_additions_round_one_by_one():
    x, first, second = (normal(3, 1024, seed=seed) for seed in (0, 1, 2))
    weight = normal(1024, seed=3)
    total, _ = kernel_interpreter.run(norm_kernel.add_rms_norm, x, (first, second), weight, eps=EPS)
    np.testing.assert_array_equal(bits(total), bits(x + (first + second)))


def test_a_row_of_nan_stays_alone():
    x, added, weight = normal(5, 1024), normal(5, 1024, seed=1), normal(1024, seed=2)
    clean = kernel_interpreter.run(norm_kernel.add_rms_norm, x, (added,), weight, eps=EPS)
    dirty = kernel_interpreter.run(
        norm_kernel.add_rms_norm, x.at[2].set(jnp.nan), (added,), weight, eps=EPS
    )
    for before, after in zip(clean, dirty, strict=True):
        others = np.arange(5) != 2
        np.testing.assert_array_equal(bits(before)[others], bits(after)[others])
        assert np.isnan(np.asarray(after[2], np.float32)).all()


def qk_case(T, N, K, H, rotary_dim):
    angles = np.random.default_rng(3).uniform(0, 6, (T, rotary_dim // 2)).astype(np.float32)
    return (
        normal(T, (N + 2 * K) * H),
        normal(H, seed=1),
        normal(H, seed=2),
        jnp.asarray(np.cos(angles)),
        jnp.asarray(np.sin(angles)),
    ), {"num_query_heads": N, "num_kv_heads": K, "eps": EPS}


@pytest.mark.parametrize(
    ("T", "N", "K", "H", "rotary_dim"),
    [(72, 4, 2, 128, 64), (64, 2, 1, 128, 128), (8, 2, 2, 64, 64), (40, 1, 1, 256, 128)],
)
def test_qk_norm_rope_equals_the_reference(T, N, K, H, rotary_dim):
    arguments, options = qk_case(T, N, K, H, rotary_dim)
    q, k = kernel_interpreter.run(qk_kernel.qk_norm_rope, *arguments, **options)
    qkv, q_weight, k_weight, *angles = arguments
    heads = qkv.reshape(T, N + 2 * K, H)
    normed_q = pallas_kernels.rms_norm(heads[:, :N], q_weight, EPS)
    normed_k = pallas_kernels.rms_norm(heads[:, N : N + K], k_weight, EPS)
    assert_within_one_rounding(q.reshape(T, N, H), pallas_kernels.apply_rope(normed_q, *angles))
    assert_within_one_rounding(k.reshape(T, K, H), pallas_kernels.apply_rope(normed_k, *angles))


def test_shapes_that_do_not_fit_are_refused_with_the_shapes():
    arguments, options = qk_case(8, 2, 2, 64, 64)
    with pytest.raises(ValueError, match=r"qk_norm_rope: .*qkv \(8, 384\)"):
        pallas_kernels.qk_norm_rope(*arguments, **(options | {"num_kv_heads": 1}))
    with pytest.raises(ValueError, match=r"add_rms_norm: .*added \['float32\(3, 4\)'\]"):
        pallas_kernels.add_rms_norm(jnp.ones((2, 4)), (jnp.ones((3, 4)),), jnp.ones(4), eps=EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: .*added \[\]"):
        pallas_kernels.add_rms_norm(jnp.ones((2, 4)), (), jnp.ones(4), eps=EPS)


@pytest.mark.parametrize("T", [32, 2048, 16384])
@pytest.mark.parametrize("D", [1024, 2048, 4096])
def test_serving_shapes_lower_for_cuda(T, D):
    def run(*arguments):
        x, added, weight, *qk = arguments
        return norm_kernel.add_rms_norm(x, (added, x), weight, eps=EPS), qk_kernel.qk_norm_rope(
            *qk, num_query_heads=16, num_kv_heads=4, eps=EPS
        )

    assert norm_kernel.why_not(dtype=jnp.bfloat16, width=D) is None
    wide, row = jax.ShapeDtypeStruct((T, D), jnp.bfloat16), jax.ShapeDtypeStruct((D,), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((T, 24 * 128), jnp.bfloat16)
    angle = jax.ShapeDtypeStruct((T, 32), jnp.float32)
    traced = jax.jit(run).trace(wide, wide, row, qkv, head, head, angle, angle)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 2


def test_what_the_kernels_cannot_serve_has_a_reason():
    assert "16-bit" in norm_kernel.why_not(dtype=jnp.float32, width=1024)
    assert "multiple of 1024" in norm_kernel.why_not(dtype=jnp.bfloat16, width=1536)
    assert "16-bit" in qk_kernel.why_not(dtype=jnp.float32, head_dim=128, rotary_dim=128)
    assert "head_dim" in qk_kernel.why_not(dtype=jnp.bfloat16, head_dim=80, rotary_dim=64)
    assert "rotary" in qk_kernel.why_not(dtype=jnp.bfloat16, head_dim=128, rotary_dim=32)
