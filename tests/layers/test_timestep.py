"""The embedding of a timestep against numpy in float64, also with 16-bit weights."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdllm.layers import linear, timestep


def sinusoids(t):
    frequencies = np.exp(-np.log(10000) * np.arange(128) / 128)
    angles = np.asarray(t, np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def silu(x):
    return x / (1 + np.exp(-x))


def test_cosines_come_before_sines():
    t = np.array([0.0, 0.35, 1.0, 601.0, 1000.0])
    # Half an ulp of float32 at 1000, twice: in the frequency and in the angle.
    np.testing.assert_allclose(timestep.sinusoids(jnp.asarray(t)), sinusoids(t), atol=1e-4)


def test_16_bit_weights_get_float32_sinusoids():
    rng = np.random.default_rng(0)
    embedder = timestep.TimestepEmbedder(32, 8, dtype=jnp.dtype(jnp.bfloat16))
    drawn = {
        path: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, jnp.bfloat16)
        for path, leaf in nnx.to_flat_state(nnx.state(embedder))
    }
    w1, b1, w2, b2 = (
        np.asarray(drawn[layer, name], np.float64)
        for layer in ("linear_1", "linear_2")
        for name in ("weight", "bias")
    )
    nnx.update(embedder, nnx.from_flat_state(drawn))
    t = np.array([600.0, 601.0])
    out = embedder(jnp.asarray(t))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, silu(sinusoids(t) @ w1.T + b1) @ w2.T + b2, atol=1e-3)


def test_a_linear_layer_can_keep_its_float32_sums():
    layer = linear.Linear(3, 2, dtype=jnp.dtype(jnp.bfloat16))
    layer.weight[...] = jnp.asarray([[1, 2**-9, 0], [0, 1, 1]], jnp.bfloat16)
    layer.bias[...] = jnp.asarray([0, -1], jnp.bfloat16)
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    out = layer(x, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, [[1 + 2**-9, 1]] * 2)
