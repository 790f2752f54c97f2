"""The optimisers of training: AdamW, and Muon against a numpy oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.train import optimizers


@dataclasses.dataclass(frozen=True)
class Options:
    optimizer: str = "muon"
    adam_b2: float = 0.98
    weight_decay: float = 0.0
    clip_norm: float = 1e9


SHAPES = {
    "layers.0.attention.w_qkv": (12, 8),
    "layers.1.attention.w_qkv": (12, 8),
    "layers.1.mlp.experts.w_gate_up": (3, 6, 8),
    "layers.1.mlp.w_down": (8, 12),
    "layers.0.norm.weight": (8,),
    "word_embeddings": (16, 8),
}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()}


def directions(options, gradients):
    optimizer = optimizers.build(options)
    params = jax.tree.map(jnp.asarray, drawn(0))
    state = optimizer.init(params)
    for gradient in gradients:
        found, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, params)
    return {path: np.asarray(array) for path, array in found.items()}, params


def orthogonal(momentum):
    """The matrix with all singular values 1 that Newton-Schulz approaches."""
    u, _, vt = np.linalg.svd(momentum, full_matrices=False)
    return u @ vt


def test_muon_moves_matrices_by_the_orthogonal_factor_of_their_momentum():
    gradients = [drawn(seed) for seed in (1, 2, 3)]
    found, _ = directions(Options(), gradients)
    for path, shape in SHAPES.items():
        if not path.endswith(optimizers._MATRICES):
            continue
        momentum, nesterov = np.zeros(shape), None
        for gradient in gradients:
            momentum = 0.95 * momentum + 0.05 * gradient[path]
            nesterov = 0.95 * momentum + 0.05 * gradient[path]
        exact = orthogonal(nesterov) * 0.2 * max(shape[-2:]) ** 0.5
        # The iteration is tuned for speed: its singular values are between 0.68 and 1.14 or so.
        values = np.linalg.svd(found[path], compute_uv=False) / (0.2 * max(shape[-2:]) ** 0.5)
        assert (values > 0.5).all() and (values < 1.3).all(), (path, values)
        cosine = np.sum(found[path] * exact) / np.linalg.norm(found[path]) / np.linalg.norm(exact)
        assert cosine > 0.95, (path, cosine)


def test_other_weights_move_as_with_adamw():
    gradients = [drawn(seed) for seed in (1, 2)]
    muon, _ = directions(Options(), gradients)
    adam, _ = directions(Options(optimizer="adamw"), gradients)
    for path in ("layers.0.norm.weight", "word_embeddings"):
        assert np.array_equal(muon[path], adam[path])
    path = "layers.1.mlp.w_down"
    assert not np.allclose(muon[path], adam[path])
    # Both kinds of moves are about as large.
    assert np.std(muon[path]) == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_matrices_decay_and_vectors_do_not(name):
    zero = {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    found, params = directions(Options(optimizer=name, weight_decay=0.1), [zero])
    for path, shape in SHAPES.items():
        expected = 0.1 * np.asarray(params[path]) if len(shape) > 1 else np.zeros(shape)
        assert np.allclose(found[path], expected, atol=1e-6), path


def test_a_stage_without_matrices_is_trained_too():
    optimizer = optimizers.build(Options())
    params = {"conv_in.kernel": jnp.ones((3, 3, 2, 4))}
    found, _ = optimizer.update(params, optimizer.init(params), params)
    assert found["conv_in.kernel"].shape == (3, 3, 2, 4)
