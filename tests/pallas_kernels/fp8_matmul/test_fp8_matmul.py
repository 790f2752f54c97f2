"""Matmuls in 8-bit floats against numpy loops and exact sums; rows are their own."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import devices

import pallas_kernels
from pallas_kernels.fp8_matmul import api, reference

E4M3 = ml_dtypes.float8_e4m3fn
# Every finite 8-bit float.
VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
FINITE = np.unique(VALUES[np.isfinite(VALUES)])


def nearest(x):
    """Returns the nearest 8-bit floats by search, of two equally near ones the even one."""
    at = np.clip(np.searchsorted(FINITE, x), 1, len(FINITE) - 1)
    low, high = FINITE[at - 1], FINITE[at]
    is_even = low.astype(E4M3).view(np.uint8) % 2 == 0
    closer = np.where(x - low == high - x, is_even, x - low < high - x)
    return np.where(closer, low, high)


def rows(tokens, width, seed=0, dtype=jnp.float32):
    """Returns rows of very different magnitudes."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-6, 6, size=(tokens, 1))
    return jnp.asarray(rng.normal(size=(tokens, width)) * scales, dtype)


def expected(x, w, scale):
    """Returns the exact product of the quantised values, in float64."""
    values, x_scale = (np.asarray(part, np.float64) for part in api.quantize_rows(x))
    out = values @ np.asarray(w, np.float64).T
    return out * x_scale[:, None] * np.asarray(scale, np.float64)


def close(out, want):
    """Sums of float32 differ from exact ones by their order, a bfloat16 by its rounding too."""
    eps = 2.0**-8 if out.dtype == jnp.bfloat16 else 0.0
    most = np.abs(want).max(axis=1, keepdims=True)
    np.testing.assert_array_less(
        np.abs(np.asarray(out, np.float64) - want), eps * np.abs(want) + 2e-6 * most + 1e-300
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_the_nearest_floats_under_their_own_scale(dtype):
    x = rows(40, 48, dtype=dtype)
    values, scale = api.quantize_rows(x)
    assert (values.dtype, scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    x64 = np.asarray(x, np.float64)
    np.testing.assert_allclose(scale, np.abs(x64).max(axis=1) / 448, rtol=1e-6)
    # As the op computes it: float32, by the reciprocal.
    given = np.asarray(x, np.float32) * (1 / np.asarray(scale))[:, None]
    np.testing.assert_array_equal(np.asarray(values, np.float64), nearest(given))
    assert (np.abs(np.asarray(values, np.float64)).max(axis=1) == 448).all()


def test_zeros_and_tiny_rows_stay_finite():
    x = jnp.asarray([[0.0] * 8, [1e-38] * 8, [-1e-44] * 8], jnp.float32)
    values, scale = api.quantize_rows(x)
    back = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None]
    assert (back[0] == 0).all() and np.isfinite(back).all() and np.abs(back).max() < 2e-38
    w, of_w = api.quantize_rows(rows(4, 8))
    assert (np.asarray(api.fp8_matmul(x[:1], w, of_w)) == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "columns", "width"), [(1, 16, 16), (33, 48, 160), (7, 5, 3)])
def test_equals_the_exact_product(tokens, columns, width, dtype):
    x = rows(tokens, width, dtype=dtype)
    w, scale = api.quantize_rows(rows(columns, width, seed=1))
    out = api.fp8_matmul(x, w, scale)
    assert out.dtype == dtype
    close(out, expected(x, w, scale))
    wide = api.fp8_matmul(x, w, scale, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    close(wide, expected(x, w, scale))


def test_all_products_of_two_values_are_exact_in_every_implementation():
    w = jnp.asarray(FINITE[:, None], jnp.float8_e4m3fn)
    for value in (448.0, 0.001953125, -208.0):  # the largest, the smallest, and one between
        one = jnp.asarray([[value]], jnp.float8_e4m3fn)
        want = value * FINITE
        for dtype in (jnp.bfloat16, jnp.float32):
            out = jax.jit(reference.widened_product, static_argnums=2)(one, w, dtype)
            np.testing.assert_array_equal(np.asarray(out[0], np.float64), want)
        np.testing.assert_array_equal(
            np.asarray(jax.jit(reference.fp8_product)(one, w)[0], np.float64), want
        )


def test_a_row_ignores_its_neighbours_and_nan_stays_in_its_row():
    x, others = rows(32, 64), rows(32, 64, seed=1)
    w, scale = api.quantize_rows(rows(48, 64, seed=2))
    watched = np.array([1, 16, 31])
    others = others.at[::2].set(jnp.nan).at[3, 5].set(jnp.inf).at[watched].set(x[watched])
    first, second = (np.asarray(api.fp8_matmul(each, w, scale)) for each in (x, others))
    np.testing.assert_array_equal(first[watched], second[watched])
    broken = ~np.isfinite(np.asarray(others)).all(axis=1)
    np.testing.assert_array_equal(np.isnan(second), np.broadcast_to(broken[:, None], second.shape))


def test_error_of_normal_data_is_that_of_three_bits():
    """e4m3 rounds by up to 2**-4, by 2.6 % in the mean square; two operands add up."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(256, 512)), jnp.float32) for _ in range(2))
    out = np.asarray(api.fp8_matmul(x, *api.quantize_rows(w)), np.float64)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.linalg.norm(out - want) / np.linalg.norm(want)
    assert 0.02 < error < 0.045


@pytest.mark.parametrize(
    ("changes", "columns", "chosen", "reason"),
    [
        ({}, 64, "xla_fp8", ""),
        ({"compute_capability": (8, 9)}, 64, "xla_fp8", ""),
        ({"compute_capability": (8, 0)}, 64, "xla", "8.9 or later, this is 8.0"),
        ({"platform": "cpu", "compute_capability": (0, 0)}, 64, "xla", "this is cpu"),
        ({}, 40, "xla", "multiples of 16, this is columns=40, contraction=32"),
    ],
)
def test_where_8_bit_floats_are_multiplied(monkeypatch, changes, columns, chosen, reason):
    devices.pretend(monkeypatch, dataclasses.replace(devices.HOPPER, **changes))
    choice = api.choose(columns=columns, contraction=32)
    assert choice.implementation == chosen
    assert reason in choice.reasons


@pytest.mark.parametrize(("dtype", "name"), [(jnp.float32, "f32"), (jnp.bfloat16, "bf16")])
def test_on_hopper_the_dot_is_what_the_gemm_rewriter_takes(monkeypatch, dtype, name):
    """One dot of two e4m3 matrices, both contracted along their last axis, to x's dtype."""
    devices.pretend(monkeypatch, devices.HOPPER)
    w, scale = api.quantize_rows(rows(48, 64))
    text = jax.jit(api.fp8_matmul).trace(rows(32, 64, dtype=dtype), w, scale).lower().as_text()
    (dot,) = (line for line in text.splitlines() if "dot_general" in line)
    assert "contracting_dims = [1] x [1]" in dot
    assert f"(tensor<32x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>) -> tensor<32x48x{name}>" in dot


def test_sums_in_bfloat16_before_scales_are_as_close_as_bfloat16_is():
    """What Hopper does for bfloat16, here in XLA's own product of the CPU."""
    values, of_x = api.quantize_rows(rows(64, 256))
    w, of_w = api.quantize_rows(rows(96, 256, seed=1))
    exact = np.asarray(reference.fp8_product(values, w), np.float64)
    scales = np.asarray(of_x, np.float64)[:, None] * np.asarray(of_w, np.float64)
    narrow = reference.fp8_product(values, w, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    out = np.asarray(reference.scaled(narrow, of_x, of_w, jnp.bfloat16), np.float64)
    # Two roundings of at most 2**-8 each.
    np.testing.assert_allclose(out, exact * scales, rtol=2 * 2.0**-8 * (1 + 2.0**-8))


def test_other_operands_are_refused_with_their_shapes():
    w, scale = api.quantize_rows(rows(48, 64))
    for x, weight, of in (
        (rows(3, 32), w, scale),
        (rows(3, 64), w.astype(jnp.bfloat16), scale),
        (rows(3, 64), w, scale[:4]),
        (rows(3, 64), w, scale.astype(jnp.bfloat16)),
    ):
        with pytest.raises(ValueError, match=r"fp8_matmul: x must be \[T, D\]"):
            pallas_kernels.fp8_matmul(x, weight, of)
    with pytest.raises(ValueError, match="x must be"):
        pallas_kernels.quantize_rows(scale)
    with pytest.raises(ValueError, match="fp8_matmul: xla_fp8 cannot run here"):
        pallas_kernels.fp8_matmul(rows(3, 64), w, scale, implementation="xla_fp8")
