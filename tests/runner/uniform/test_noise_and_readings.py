"""Random tokens and draws of rows: their distributions, what they depend on, and what is read."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.layers import unembedding
from jdllm.runner.uniform import noise, reading

V, D = 16, 8


def test_uniform_tokens_are_uniform_and_depend_on_seed_position_and_step_alone():
    seed = jnp.asarray([[0, 7], [0, 8]], jnp.uint32)
    positions = jnp.broadcast_to(jnp.arange(4000, dtype=jnp.int32), (2, 4000))
    tokens = noise.uniform_tokens(seed, positions, jnp.asarray([3, 3]), V)
    for row in np.asarray(tokens):
        counts = np.bincount(row, minlength=V)
        assert len(counts) == V
        expected = 4000 / V
        assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi2, 15 degrees, p = 0.001
    assert (tokens[0] != tokens[1]).mean() > 0.8
    # Neither the row nor what else is asked for matters.
    swapped = noise.uniform_tokens(seed[::-1], positions[:, 100:200], jnp.asarray([3, 4]), V)
    np.testing.assert_array_equal(swapped[0], tokens[1, 100:200])
    assert (swapped[1] != tokens[0, 100:200]).mean() > 0.8


def model_of(rng):
    """Returns a head with a cap of 5, and its embedding, scaled by 3."""
    table = rng.normal(size=(V, D)).astype(np.float32)
    return table, types.SimpleNamespace(
        unembedding=lambda: unembedding.LMHead(weight=jnp.asarray(table), softcap=5.0),
        mix=lambda weights: weights @ table * 3,
    )


def test_draws_follow_the_tempered_distribution():
    rng = np.random.default_rng(0)
    table, model = model_of(rng)
    count, temperature = 6000, 0.7
    one = rng.normal(size=(1, D)).astype(np.float32)
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    keys = noise.draw_keys(jnp.asarray([[1, 2]], jnp.uint32), positions, jnp.asarray([5]))
    hidden = jnp.broadcast_to(jnp.asarray(one), (count, D))
    found = jax.jit(lambda h, k: reading.read_row(model, h, jnp.float32(temperature), k))(
        hidden, keys[0]
    )
    scaled = 5 * np.tanh(one[0] @ table.T / 5) / temperature
    share = np.exp(scaled) / np.exp(scaled).sum()
    counts = np.bincount(np.asarray(found.drawn), minlength=V)
    often = share * count > 5
    statistic = ((counts - share * count) ** 2 / (share * count))[often].sum()
    assert statistic < 37.7 and often.sum() > 5


def test_a_reading_equals_numpy_and_leaves_other_rows_alone():
    rng = np.random.default_rng(1)
    table, model = model_of(rng)
    R, L = 4, 3
    hidden = rng.normal(size=(R, L, D)).astype(np.float32)
    temperature = np.array([0.4, 0.8, 1.0, 2.0], np.float32)
    wanted = np.array([True, False, True, True])
    keys = rng.integers(0, 2**32, (R, L, 2), dtype=np.uint32)
    found = jax.jit(lambda *a: reading.read(model, *a))(
        hidden, jnp.asarray(temperature), jnp.asarray(keys), jnp.asarray(wanted)
    )
    for r in range(R):
        if not wanted[r]:
            assert not any(np.any(leaf[r]) for leaf in jax.tree.leaves(found))
            continue
        logits = 5 * np.tanh(hidden[r].astype(np.float64) @ table.T / 5)
        share = np.exp(logits / temperature[r])
        share /= share.sum(axis=1, keepdims=True)
        entropy = -(share * np.log(share)).sum(axis=1)
        plain = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert found.best[r].tolist() == logits.argmax(axis=1).tolist()
        np.testing.assert_allclose(found.entropy[r], entropy, atol=1e-5)
        np.testing.assert_allclose(found.logprob[r], plain.max(axis=1), atol=1e-5)
        np.testing.assert_allclose(found.expected[r], share @ table * 3, atol=1e-4)
