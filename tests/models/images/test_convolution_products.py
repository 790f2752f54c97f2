"""Convolutions as products of patches against XLA's, results and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.models.images.autoencoder import layers, products


def convolved(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=(padding, padding),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 1, (1, 1)), (3, 2, (0, 1)), (1, 1, (0, 0)), (5, 1, (2, 2))]
)
@pytest.mark.parametrize(
    "sides", [(7, 9), *(pytest.param(one, marks=pytest.mark.campaign) for one in [(8, 6), (2, 12)])]
)
def test_is_the_convolution_with_its_gradients(size, stride, padding, sides):
    keys = jax.random.split(jax.random.key(size * stride), 3)
    x = jax.random.normal(keys[0], (3, *sides, 4))
    kernel = jax.random.normal(keys[1], (size, size, 4, 6))
    wanted, pull_wanted = jax.vjp(lambda x, k: convolved(x, k, stride, padding), x, kernel)
    found, pull = jax.vjp(lambda x, k: products.convolve(x, k, stride, padding), x, kernel)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    grad = jax.random.normal(keys[2], wanted.shape)
    for ours, theirs in zip(pull(grad), pull_wanted(grad), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_layer_computes_the_same_in_both_ways():
    layer = layers.Conv(4, 6, jnp.bfloat16, stride=2)
    layer.kernel[...] = jax.random.normal(jax.random.key(0), (3, 3, 4, 6), jnp.bfloat16)
    layer.bias[...] = jnp.arange(6.0, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (2, 8, 10, 4), jnp.bfloat16)
    wanted = layer(x)
    layer.has_fast_gradient = True
    found = layer(x)
    assert found.dtype == wanted.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=2**-6
    )
