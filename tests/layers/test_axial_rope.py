"""Rotary positions with several axes against complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import axial_rope

AXES, THETA = (4, 6, 6), 256.0


def rotated_by_complex_numbers(x, positions):
    """x [T, N, H] as complex pairs, times e to the i angle; in float64."""
    frequencies = [THETA ** (-np.arange(0, d, 2) / d) for d in AXES]
    turned = np.concatenate(
        [positions[:, a, None] * frequencies[a][None] for a in range(len(AXES))], axis=1
    )
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * turned)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def test_pairs_turn_by_the_positions_of_their_axis():
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 300, size=(2, 5, 3))
    x = rng.normal(size=(2, 5, 3, sum(AXES)))
    cos_sin = axial_rope.angles(positions, axes_dims=AXES, theta=THETA)
    assert [part.shape for part in cos_sin] == [(2, 5, sum(AXES) // 2)] * 2
    out = axial_rope.rotate_pairs(jnp.asarray(x, jnp.float32), cos_sin)
    for row in range(2):
        expected = rotated_by_complex_numbers(x[row], positions[row])
        np.testing.assert_allclose(out[row], expected, atol=2e-4)  # 300 rad in float32


def test_rounding_of_16_bit_heads_comes_last():
    rng = np.random.default_rng(1)
    positions = rng.integers(257, 300, size=(1, 8, 3))  # bfloat16 has no odd numbers here
    x = jnp.asarray(rng.normal(size=(1, 8, 2, sum(AXES))), jnp.bfloat16)
    out = axial_rope.rotate_pairs(x, axial_rope.angles(positions, axes_dims=AXES, theta=THETA))
    assert out.dtype == jnp.bfloat16
    expected = rotated_by_complex_numbers(np.asarray(x[0], np.float64), positions[0])
    np.testing.assert_allclose(np.asarray(out[0], np.float64), expected, rtol=2**-8, atol=2e-3)


def test_every_axis_needs_its_dims():
    with pytest.raises(ValueError, match="2 axes"):
        axial_rope.angles(np.zeros((1, 4, 3), np.int32), axes_dims=(4, 6), theta=THETA)
