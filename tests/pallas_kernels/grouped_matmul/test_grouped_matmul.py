"""Mixture-of-experts matmuls equal loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gate_up_group, grouped_matmul, interleave_gate_up, split_gate_up

T, D, F, E, TOP = 24, 12, 10, 7, 3
# float32 sums of a few dozen terms of order 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
IMPLEMENTATIONS = ["xla", "dense"]


def weights(seed, *, experts=E, size=F, width=D):
    rng = np.random.default_rng(seed)
    shape = (experts, size, width)
    gate, up = rng.normal(size=(2, *shape)).astype(np.float32)
    return gate, up, rng.normal(size=(experts, width, size)).astype(np.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oracle(x, gate, up, down, ids, expert_weights, valid=None, activation=silu):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    out = np.zeros(x.shape)
    for t in range(len(x)):
        if valid is not None and not valid[t]:
            continue
        for e, weight in zip(ids[t], expert_weights[t], strict=True):
            out[t] += weight * (down[e] @ (activation(gate[e] @ x[t]) * (up[e] @ x[t])))
    return out


def routing(kind, rng):
    match kind:
        case "random":
            ids = np.stack([rng.permutation(E)[:TOP] for _ in range(T)])
        case "one_expert_takes_all":
            ids = np.full((T, TOP), 4)
        case "empty_experts":
            ids = rng.choice([1, 5], (T, TOP))
        case "first_and_last":
            ids = rng.choice([0, E - 1], (T, TOP))
    return ids.astype(np.int32), rng.uniform(0.1, 1, (T, TOP)).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "kind", ["random", "one_expert_takes_all", "empty_experts", "first_and_last"]
)
def test_equals_loops(kind, implementation):
    rng = np.random.default_rng(3)
    gate, up, down = weights(0)
    x = rng.normal(size=(T, D)).astype(np.float32)
    ids, expert_weights = routing(kind, rng)
    out = grouped_matmul(
        x,
        interleave_gate_up(gate, up),
        down,
        ids,
        expert_weights,
        valid=np.ones(T, bool),
        implementation=implementation,
    )
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, oracle(x, gate, up, down, ids, expert_weights), **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_geglu_equals_loops(implementation):
    rng = np.random.default_rng(4)
    gate, up, down = weights(1)
    x = rng.normal(size=(T, D)).astype(np.float32)
    ids, expert_weights = routing("random", rng)
    out = grouped_matmul(
        x,
        interleave_gate_up(gate, up),
        down,
        ids,
        expert_weights,
        activation="gelu_tanh",
        implementation=implementation,
    )
    expected = oracle(x, gate, up, down, ids, expert_weights, activation=gelu_tanh)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-4)  # terms of up to 100


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [F, 2 * F], ids=["same-width", "wider"])
def test_the_shared_expert_is_added_to_every_row(width, implementation):
    rng = np.random.default_rng(4)
    gate, up, down = weights(0)
    shared = [array[0] for array in weights(9, experts=1, size=width)]
    x = rng.normal(size=(T, D)).astype(np.float32)
    ids, expert_weights = routing("random", rng)
    valid = rng.random(T) < 0.5
    out = grouped_matmul(
        x,
        interleave_gate_up(gate, up),
        down,
        ids,
        expert_weights,
        shared=(interleave_gate_up(*shared[:2]), shared[2]),
        valid=valid,
        implementation=implementation,
    )
    everyone = np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32)
    expected = oracle(x, gate, up, down, ids, expert_weights, valid)
    expected += oracle(x, *(array[None] for array in shared), *everyone)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_invalid_tokens_give_zeros_and_leak_nothing(share, implementation):
    rng = np.random.default_rng(4)
    gate, up, down = weights(0)
    valid = rng.random(T) < share
    x = np.where(valid[:, None], rng.normal(size=(T, D)), np.nan).astype(np.float32)
    ids, expert_weights = routing("random", rng)
    expert_weights[~valid] = np.nan
    # Experts that only invalid tokens chose hold NaN, which must not show.
    chosen = np.unique(ids[valid])
    if implementation == "xla":
        for array in (gate, up, down):
            array[[e for e in range(E) if e not in chosen]] = np.nan
    out = grouped_matmul(
        x,
        interleave_gate_up(gate, up),
        down,
        ids,
        expert_weights,
        valid=valid,
        implementation=implementation,
    )
    expected = oracle(x, gate, up, down, ids, expert_weights, valid)
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    assert np.all(np.asarray(out)[~valid] == 0)


def test_unused_experts_leak_nothing():
    rng = np.random.default_rng(5)
    gate, up, down = weights(0)
    x = rng.normal(size=(T, D)).astype(np.float32)
    ids, expert_weights = routing("empty_experts", rng)
    gate[[0, 2, 3, 4, 6]] = np.nan
    out = grouped_matmul(
        x, interleave_gate_up(gate, up), down, ids, expert_weights, valid=np.ones(T, bool)
    )
    np.testing.assert_allclose(out, oracle(x, gate, up, down, ids, expert_weights), **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_outside_the_shard_contribute_nothing(implementation):
    """The results of the two halves of the experts, with shifted ids, sum to the whole."""
    rng = np.random.default_rng(6)
    gate, up, down = weights(0, experts=8)
    x = rng.normal(size=(T, D)).astype(np.float32)
    ids = rng.integers(0, 8, (T, TOP)).astype(np.int32)
    expert_weights = rng.uniform(0.1, 1, (T, TOP)).astype(np.float32)
    total = np.zeros((T, D))
    for first in (0, 4):
        total += grouped_matmul(
            x,
            interleave_gate_up(gate, up)[first : first + 4],
            down[first : first + 4],
            ids - first,
            expert_weights,
            implementation=implementation,
        )
    np.testing.assert_allclose(total, oracle(x, gate, up, down, ids, expert_weights), **TOLERANCE)


def test_random_routings_and_neighbours():
    """At a larger shape: values are right, and a token's bits do not depend on other tokens."""
    tokens, width, size, experts, top = 64, 32, 64, 16, 4
    gate, up, down = weights(1, experts=experts, size=size, width=width)
    gate_up = interleave_gate_up(gate, up)
    rng = np.random.default_rng(7)
    watched = rng.normal(size=(5, width)).astype(np.float32)
    watched_ids = rng.integers(0, experts, (5, top)).astype(np.int32)
    watched_weights = rng.uniform(0.1, 1, (5, top)).astype(np.float32)
    kept = []
    for draw in range(8):
        x = rng.normal(size=(tokens, width)).astype(np.float32)
        popularity = rng.dirichlet(np.full(experts, 0.1 + draw))
        ids = rng.choice(experts, (tokens, top), p=popularity).astype(np.int32)
        expert_weights = rng.uniform(0.1, 1, (tokens, top)).astype(np.float32)
        place = rng.choice(tokens, 5, replace=False)
        valid = rng.random(tokens) < 0.7
        x[place], ids[place], expert_weights[place] = watched, watched_ids, watched_weights
        valid[place] = True
        out = np.asarray(grouped_matmul(x, gate_up, down, ids, expert_weights, valid=valid))
        expected = oracle(x, gate, up, down, ids, expert_weights, valid)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)  # values up to 1e3
        kept.append(out[place])
    for other in kept[1:]:
        np.testing.assert_array_equal(other, kept[0])


def test_bfloat16():
    rng = np.random.default_rng(8)
    gate, up, down = (w.astype(jnp.bfloat16) for w in weights(2))
    x = rng.normal(size=(T, D)).astype(jnp.bfloat16)
    ids, expert_weights = routing("random", rng)
    out = grouped_matmul(
        x, interleave_gate_up(gate, up), down, ids, expert_weights, valid=np.ones(T, bool)
    )
    expected = oracle(x, gate, up, down, ids, expert_weights)
    # Only the activations between the two matmuls are rounded (8 bits); sums reach about 100.
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())


def test_memory_does_not_grow_with_experts():
    tokens, width, size, experts, top = 2048, 64, 64, 64, 4
    shapes = [
        ((tokens, width), jnp.bfloat16),
        ((experts, 2 * size, width), jnp.bfloat16),
        ((experts, width, size), jnp.bfloat16),
        ((tokens, top), jnp.int32),
        ((tokens, top), jnp.float32),
    ]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    compiled = jax.jit(grouped_matmul).lower(*arguments).compile()
    all_experts_on_all_tokens = tokens * experts * 2 * size * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < all_experts_on_all_tokens / 4


def test_gradients_of_dense_match_finite_differences():
    """They are central differences, in numpy float64, of a weighted sum of the output."""
    rng = np.random.default_rng(9)
    gate, up, down = weights(3, experts=3, size=4, width=5)
    x = rng.normal(size=(6, 5)).astype(np.float32)
    ids = rng.integers(0, 3, (6, 2)).astype(np.int32)
    expert_weights = rng.uniform(0.1, 1, (6, 2)).astype(np.float32)
    cotangent = rng.normal(size=(6, 5))
    valid = np.array([1, 1, 0, 1, 1, 1], bool)

    def loss(x, gate, up, down, expert_weights):
        packed = interleave_gate_up(gate, up)
        out = grouped_matmul(
            x, packed, down, ids, expert_weights, valid=valid, implementation="dense"
        )
        return jnp.sum(out * cotangent)

    arguments = [jnp.asarray(a) for a in (x, gate, up, down, expert_weights)]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*arguments)

    def exact(values):
        x, gate, up, down, expert_weights = values
        return np.sum(oracle(x, gate, up, down, ids, expert_weights, valid) * cotangent)

    step = 1e-4
    for which, gradient in enumerate(gradients):
        for _ in range(6):
            place = tuple(rng.integers(0, n) for n in gradient.shape)
            sides = []
            for sign in (1, -1):
                moved = [np.float64(a) for a in arguments]
                moved[which][place] += sign * step
                sides.append(exact(moved))
            slope = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(gradient[place], slope, rtol=1e-3, atol=1e-4)
    assert np.all(np.asarray(gradients[0])[2] == 0)


@pytest.mark.parametrize("size, group", [(512, 64), (64, 64), (96, 96), (10, 10)])
def test_interleave_by_hand_and_back(size, group):
    assert gate_up_group(size) == group
    gate = np.arange(2 * size * 3, dtype=np.float32).reshape(2, size, 3)
    up = -gate - 1
    both = interleave_gate_up(gate, up)
    assert isinstance(both, np.ndarray)
    rows = [("gate", g) for g in range(group)] + [("up", g) for g in range(group)]
    for row, (kind, index) in enumerate(rows):
        np.testing.assert_array_equal(both[:, row], {"gate": gate, "up": up}[kind][:, index])
    if size > group:
        np.testing.assert_array_equal(both[:, 2 * group], gate[:, group])
        np.testing.assert_array_equal(both[:, -1], up[:, -1])
    for array, back in zip((gate, up), split_gate_up(both), strict=True):
        np.testing.assert_array_equal(back, array)
    on_device = interleave_gate_up(jnp.asarray(gate), jnp.asarray(up))
    np.testing.assert_array_equal(on_device, both)


def test_bad_shapes_are_named():
    gate, up, down = weights(0)
    x, ids = jnp.zeros((4, D)), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"w_gate_up must be \[E, 2 \* I, D\].*\(7, 10, 12\)"):
        grouped_matmul(x, gate, down, ids, jnp.zeros((4, 2)))
    packed = interleave_gate_up(gate, up)
    with pytest.raises(ValueError, match=r"shared must be .* \(10, 12\), \(12, 10\)"):
        grouped_matmul(x, packed, down, ids, jnp.zeros((4, 2)), shared=(gate[0], down[0]))
    with pytest.raises(ValueError, match="one dtype"):
        packed = interleave_gate_up(gate, up)
        grouped_matmul(x.astype(jnp.bfloat16), packed, down, ids, jnp.zeros((4, 2)))
