"""Norms and rotary positions against numpy loops written from the formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jdllm.layers import norm, rope

ATOL = 1e-5  # float32 rounding of a few operations on values of order one


def test_rms_norm_equals_the_formula():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8)).astype(np.float32) * 3
    weight = rng.uniform(0.5, 1.5, 8).astype(np.float32)
    expected = np.empty_like(x)
    for t in range(3):
        mean_square = sum(float(v) ** 2 for v in x[t]) / 8
        expected[t] = [v / math.sqrt(mean_square + 1e-6) * w for v, w in zip(x[t], weight)]
    out = pallas_kernels.rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6)
    np.testing.assert_allclose(out, expected, atol=ATOL)


def test_layer_norm_equals_the_formula():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 8)).astype(np.float32) * 3 + 100
    expected = np.empty_like(x)
    for t in range(3):
        mean = sum(map(float, x[t])) / 8
        variance = sum((float(v) - mean) ** 2 for v in x[t]) / 8
        expected[t] = [(v - mean) / math.sqrt(variance + 1e-6) for v in x[t]]
    # Values near 100 are known to 8e-6, and float32 sums of them no better.
    np.testing.assert_allclose(norm.layer_norm(jnp.asarray(x), eps=1e-6), expected, atol=5 * ATOL)


def test_rms_norm_takes_bfloat16_statistics_in_float32():
    # In bfloat16 the sum of 4096 equal squares would stop growing at 256.
    x = jnp.full((1, 4096), 2.0, jnp.bfloat16)
    out = pallas_kernels.rms_norm(x, jnp.ones((4096,), jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=1e-2)


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rope_rotates_pairs_of_the_first_dims_and_passes_the_rest(rotary_dim):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 2, 16)).astype(np.float32)
    positions, theta = np.array([0, 1, 7, 1000]), 600000.0
    expected, half = x.copy(), rotary_dim // 2
    for t, p in enumerate(positions):
        for j in range(half):
            angle = p * theta ** (-2 * j / rotary_dim)
            a, b = x[t, :, j], x[t, :, j + half]
            expected[t, :, j] = a * math.cos(angle) - b * math.sin(angle)
            expected[t, :, j + half] = b * math.cos(angle) + a * math.sin(angle)
    angles = rope.rope_angles(jnp.asarray(positions), rotary_dim=rotary_dim, theta=theta)
    # At position 1000 a float32 angle has an absolute error of up to 6e-5.
    np.testing.assert_allclose(
        pallas_kernels.apply_rope(jnp.asarray(x), *angles), expected, atol=3e-4
    )


def test_proportional_rope_turns_the_pairs_of_the_highest_frequencies_only():
    positions, theta = np.array([0, 3, 50]), 1e6
    cos, sin = rope.rope_angles(jnp.asarray(positions), rotary_dim=16, theta=theta, num_turning=2)
    for t, p in enumerate(positions):
        angles = [p * theta ** (-2 * j / 16) if j < 2 else 0.0 for j in range(8)]
        np.testing.assert_allclose(cos[t], np.cos(angles), atol=ATOL)
        np.testing.assert_allclose(sin[t], np.sin(angles), atol=ATOL)
