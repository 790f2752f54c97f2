"""Random weights: which of them are constant, how wide the others are, and that both ways agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.models import random_weights

# With the standard deviation that keeps the variance 1, or a constant.
DRAWN = {
    "layers.0.attention.w_qkv": ((64, 256), 256**-0.5),
    "layers.0.experts.w_gate": ((4, 32, 64), 64**-0.5),
    "layers.0.router.weight": ((100, 256), 100**-0.5),
    "encoder.conv.kernel": ((3, 3, 25, 64), (3 * 3 * 25) ** -0.5),
    "word_embeddings": ((256, 64), 1.0),
}
CONSTANT = {
    "layers.0.norm.weight": ((32,), 1.0),
    "layers.0.attention.b_qkv": ((32,), 0.0),
    "encoder.conv.bias": ((64,), 0.0),
}
SHAPES = {
    path: jax.ShapeDtypeStruct(shape, jnp.float32)
    for path, (shape, _) in (DRAWN | CONSTANT).items()
}


@pytest.mark.parametrize("draw", [random_weights.drawn, random_weights.on_host])
def test_activations_keep_their_variance(draw):
    weights = draw(SHAPES, seed=1)
    assert weights.keys() == SHAPES.keys()
    for path, (shape, deviation) in DRAWN.items():
        array = np.asarray(weights[path])
        assert array.dtype == np.float32 and array.shape == shape
        # The estimate of a deviation from n numbers has itself a deviation of 1/sqrt(2n).
        assert array.std() == pytest.approx(deviation, rel=5 / np.sqrt(2 * array.size)), path
        assert abs(array.mean()) < 5 * deviation / np.sqrt(array.size), path
    for path, (_, value) in CONSTANT.items():
        assert (np.asarray(weights[path]) == value).all(), path
    other = draw(SHAPES, seed=2)
    assert all((np.asarray(weights[path]) != np.asarray(other[path])).any() for path in DRAWN)


def test_the_residual_branches_of_a_deep_model_are_smaller():
    shapes = {
        f"layers.0.{path}": jax.ShapeDtypeStruct((16, 16), jnp.float32)
        for path in ("attention.w_out", "mlp.w_down", "mlp.w_up")
    }
    flat, deep = random_weights.drawn(shapes), random_weights.drawn(shapes, num_layers=8)
    for path, share in zip(shapes, (0.25, 0.25, 1.0), strict=True):
        np.testing.assert_allclose(deep[path], share * flat[path], rtol=1e-6)
