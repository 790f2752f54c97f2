"""Gemma4Renoise against loops in numpy over random logits, and its laws by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gemma_oracle import Oracle

import pallas_kernels
from jdllm.algorithms import lookup
from jdllm.decoding.uniform import gemma4_renoise, interface

RULE = gemma4_renoise.Gemma4Renoise()
L, V = 12, 40
ATOL = 1e-5  # sums of twelve float32 entropies of up to 4 nats


def params_of(*rows):
    arrays = lookup.padding(lookup.UNIFORM, len(rows))
    defaults = lookup.TABLE["Gemma4Renoise"].defaults
    for i, row in enumerate(rows):
        lookup.fill(arrays, i, "Gemma4Renoise", defaults | row, row_length=L)
    return interface.UniformParams(**{k: jnp.asarray(v) for k, v in arrays.items()})


def fresh(tokens):
    R = len(tokens)
    return interface.NoisyCanvas(
        tokens=jnp.asarray(tokens),
        best=jnp.full((R, L), -1, jnp.int32),
        same_steps=jnp.zeros((R,), jnp.int32),
        step=jnp.zeros((R,), jnp.int32),
    )


def seen_of(logits, drawn, noise, temperature):
    stats = pallas_kernels.logits_stats(
        jnp.asarray((logits / temperature[:, None, None]).reshape(-1, V), jnp.float32)
    )
    return interface.Seen(
        best=jnp.asarray(logits.argmax(axis=2), jnp.int32),
        entropy=stats.entropy.reshape(-1, L),
        drawn=jnp.asarray(drawn),
        noise=jnp.asarray(noise),
    )


ROWS = [
    {},
    {"max_denoising_steps": 6, "entropy_bound": 5.0},
    {"max_denoising_steps": 1},
    {"entropy_bound": 0.0, "max_denoising_steps": 9},
    {"confidence_threshold": 1.2, "stability_threshold": 0},
    {"confidence_threshold": 1.2, "stability_threshold": 1, "entropy_bound": 2.0},
    {"confidence_threshold": 1.2, "stability_threshold": 3, "t_max": 1.5, "t_min": 0.1},
    {"confidence_threshold": 0.0, "stability_threshold": 0, "max_denoising_steps": 30},
]


@pytest.mark.parametrize("seed", range(4))
def test_equals_loops_over_random_logits(seed):
    rng = np.random.default_rng(seed)
    params, oracles = params_of(*ROWS), [Oracle(row) for row in ROWS]
    R = len(ROWS)
    canvas = fresh(rng.integers(0, V, (R, L)).astype(np.int32))
    outputs, ends = [None] * R, [None] * R
    denoise = jax.jit(RULE.denoise)
    base = rng.normal(size=(R, L, V)) * 3
    for step in range(48):
        # Most steps repeat the argmax of the step before, or nothing would ever be stable.
        if rng.random() < 0.3:
            base = rng.normal(size=(R, L, V)) * 3
        logits = (base * rng.uniform(0.8, 1.6, (R, 1, 1))).astype(np.float32).astype(np.float64)
        drawn, noise = rng.integers(0, V, (2, R, L)).astype(np.int32)
        # Rows that have ended go on here, and their temperature falls below 0.
        temperature = np.maximum(RULE.temperature(canvas.step, params), 0.01)
        canvas, is_done = denoise(canvas, seen_of(logits, drawn, noise, temperature), params)
        for r, oracle in enumerate(oracles):
            if outputs[r] is not None:
                continue
            np.testing.assert_allclose(temperature[r], oracle.temperature(), atol=ATOL)
            expected, output = oracle.step(logits[r], drawn[r], noise[r])
            assert canvas.tokens[r].tolist() == expected, (step, r)
            assert bool(is_done[r]) == (output is not None), (step, r)
            if output is not None:
                outputs[r], ends[r] = output, step + 1
                assert canvas.best[r].tolist() == output
    assert all(output is not None for output in outputs)
    assert ends[0] == 48 and ends[1] == 6 and ends[2] == 1 and ends[7] == 30
    assert ends[4] < 48 and ends[5] >= 2 and ends[6] >= 4


def test_the_first_position_in_order_is_always_kept_and_ties_go_to_the_left():
    entropy = jnp.asarray([[0.5, 0.2, 0.2, 0.9]], jnp.float32)
    before = gemma4_renoise.sum_before(entropy)
    np.testing.assert_allclose(before, [[0.4, 0.0, 0.2, 0.9]], atol=ATOL)
    same = gemma4_renoise.sum_before(jnp.full((1, 4), 0.25))
    np.testing.assert_allclose(same, [[0.0, 0.25, 0.5, 0.75]], atol=ATOL)


def test_temperatures_of_the_first_and_of_the_last_step():
    params = params_of({}, {"max_denoising_steps": 4, "t_max": 1.0, "t_min": 0.5})
    steps = jnp.asarray([0, 0]), jnp.asarray([47, 3])
    np.testing.assert_allclose(RULE.temperature(steps[0], params), [0.8, 1.0], atol=ATOL)
    last = [0.4 + 0.4 / 48, 0.5 + 0.5 / 4]
    np.testing.assert_allclose(RULE.temperature(steps[1], params), last, atol=ATOL)
