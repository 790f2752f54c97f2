"""The expert kernels equal loops in float64 in the interpreter and lower for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from pallas_kernels import grouped_matmul, interleave_gate_up, tiles
from pallas_kernels.grouped_matmul import expert_tiles, mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu import Tile
from pallas_kernels.hopper import compat

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import kernel_interpreter

# bfloat16 operands; hidden values and each expert's result are rounded to 8 bits once more.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
T, D, F, E, TOP = 20, 128, 64, 5, 2
SMALL = Tile(rows=8, warpgroups=1, block_k=64, stages=2)
both_sources_of_rows = pytest.mark.parametrize("gathers", [False, True], ids=["copied", "gathered"])


def gathering(tile, gathers=True):
    return dataclasses.replace(tile, gathers=gathers)


def weights(*, experts=E, size=F, width=D, seed=0):
    rng = np.random.default_rng(seed)
    gate, up = rng.normal(size=(2, experts, size, width)) * width**-0.5
    down = rng.normal(size=(experts, width, size)) * size**-0.5
    return tuple(jnp.asarray(a, jnp.bfloat16) for a in (interleave_gate_up(gate, up), down))


def used_pairs(ids, experts, valid=None):
    used = (ids >= 0) & (ids < experts)
    return used if valid is None else used & np.asarray(valid)[:, None]


def silu(gate):
    return gate / (1 + np.exp(-gate))


def gelu_tanh(gate):
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


def oracle(x, w_gate_up, w_down, ids, expert_weights, *, valid=None, activation=silu):
    x, w_gate_up, w_down = (np.asarray(a, np.float64) for a in (x, w_gate_up, w_down))
    out = np.zeros(x.shape)
    for t, choice in np.argwhere(used_pairs(ids, len(w_down), valid)):
        e = ids[t, choice]
        both = (w_gate_up[e] @ x[t]).reshape(-1, 2, 64)
        gate, up = both[:, 0].reshape(-1), both[:, 1].reshape(-1)
        out[t] += expert_weights[t, choice] * (w_down[e] @ (activation(gate) * up))
    return out


def shared_expert(size=F, width=D, seed=50):
    w_gate_up, w_down = weights(experts=1, size=size, width=width, seed=seed)
    return w_gate_up[0], w_down[0]


def routing(kind, rng, *, tokens=T, experts=E, top=TOP):
    match kind:
        case "random":
            ids = np.stack([rng.permutation(experts)[:top] for _ in range(tokens)])
        case "one_expert_takes_all":
            ids = np.full((tokens, top), experts - 2)
        case "some_outside":
            ids = rng.integers(-1, experts + 2, (tokens, top))
    return ids.astype(np.int32), rng.uniform(0.1, 1, (tokens, top)).astype(np.float32)


def interpreted(*arguments, tile=SMALL, **options):
    return np.asarray(
        kernel_interpreter.run(
            mosaic_gpu.grouped_matmul, *arguments, tile=tile, num_ctas=3, **options
        )
    )


@both_sources_of_rows
@pytest.mark.parametrize("kind", ["random", "one_expert_takes_all", "some_outside"])
def test_equals_loops(kind, gathers):
    rng = np.random.default_rng(3)
    w_gate_up, w_down = weights()
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16)
    arguments = (x, w_gate_up, w_down, *routing(kind, rng))
    out = interpreted(*arguments, tile=gathering(SMALL, gathers))
    np.testing.assert_allclose(out, oracle(*arguments), **TOLERANCE)


@both_sources_of_rows
def test_gelu_experts_equal_loops(gathers):
    """Gates from -12 to 12: where GELU and SiLU differ, and where an exponential is huge."""
    rng = np.random.default_rng(13)
    w_gate_up, w_down = weights()
    x = jnp.asarray(4 * rng.normal(size=(T, D)), jnp.bfloat16)
    arguments = (x, w_gate_up, w_down, *routing("random", rng))
    shared = shared_expert()
    tile = gathering(SMALL, gathers)
    out = interpreted(*arguments, tile=tile, activation="gelu_tanh", shared=shared)
    everyone = np.zeros((T, 1), np.int32), np.ones((T, 1))
    expected = oracle(*arguments, activation=gelu_tanh)
    expected += oracle(x, shared[0][None], shared[1][None], *everyone, activation=gelu_tanh)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out / scale, expected / scale, **TOLERANCE)
    other = oracle(*arguments)
    assert np.abs(other - oracle(*arguments, activation=gelu_tanh)).max() > 0.1  # not the same


@both_sources_of_rows
@pytest.mark.parametrize(
    ("tile", "size", "width"),
    marks.every(
        2,
        [
            # Two warpgroups if the sizes allow, else one; pieces of 8, 16 and 32 rows stored.
            (Tile(rows=24, warpgroups=2, block_k=128, stages=2), 192, 256),
            (Tile(rows=48, warpgroups=2, block_k=64, stages=3), 128, 128),
        ],
    ),
    ids=["fitted", "wide"],
)
def test_every_way_through_the_tiles(tile, size, width, gathers):
    rng = np.random.default_rng(4)
    tokens, top, experts = 60, 2, 3
    w_gate_up, w_down = weights(experts=experts, size=size, width=width)
    x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    routed = routing("random", rng, tokens=tokens, experts=experts, top=top)
    arguments = (x, w_gate_up, w_down, *routed)
    out = interpreted(*arguments, tile=gathering(tile, gathers), out_dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), oracle(*arguments), **TOLERANCE)


@both_sources_of_rows
@pytest.mark.parametrize(
    "tile",
    [SMALL, Tile(rows=24, warpgroups=2, block_k=128, stages=2)],
    ids=["several-tiles", "one-tile"],
)
@pytest.mark.parametrize("tokens", marks.every(2, [20, 3]))
def test_the_shared_expert_is_one_more_of_every_token(tile, tokens, gathers):
    tile = gathering(tile, gathers)
    rng = np.random.default_rng(8)
    w_gate_up, w_down = weights()
    shared = shared_expert()
    x = jnp.asarray(rng.normal(size=(tokens, D)), jnp.bfloat16)
    arguments = (x, w_gate_up, w_down, *routing("some_outside", rng, tokens=tokens))
    out = interpreted(*arguments, shared=shared, tile=tile)
    expected = oracle(*arguments)
    everyone = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1))
    expected += oracle(x, shared[0][None], shared[1][None], *everyone)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


@both_sources_of_rows
def test_invalid_tokens_give_zeros_and_leak_nothing(gathers):
    rng = np.random.default_rng(5)
    w_gate_up, w_down = weights()
    valid = rng.random(T) < 0.6
    x = jnp.asarray(np.where(valid[:, None], rng.normal(size=(T, D)), np.nan), jnp.bfloat16)
    ids, expert_weights = routing("random", rng)
    ids[valid] = np.minimum(ids[valid], 3)  # no valid token chooses the last expert
    ids[~valid, 0] = E - 1
    expert_weights[~valid] = np.nan
    w_gate_up, w_down = w_gate_up.at[E - 1].set(jnp.nan), w_down.at[E - 1].set(jnp.nan)
    arguments = (x, w_gate_up, w_down, ids, expert_weights)
    out = interpreted(*arguments, valid=jnp.asarray(valid), tile=gathering(SMALL, gathers))
    np.testing.assert_allclose(out, oracle(*arguments, valid=valid), **TOLERANCE)
    assert np.all(out[~valid] == 0)


@both_sources_of_rows
def test_nobody_routed_gives_zeros(gathers):
    x = jnp.full((4, D), jnp.nan, jnp.bfloat16)
    routed = routing("random", np.random.default_rng(0), tokens=4)
    nobody = jnp.zeros(4, bool)
    out = interpreted(x, *weights(), *routed, valid=nobody, tile=gathering(SMALL, gathers))
    assert np.all(out == 0)


@both_sources_of_rows
def test_a_token_ignores_its_neighbours_bit_for_bit(gathers):
    rng = np.random.default_rng(6)
    w_gate_up, w_down = weights()
    shared = shared_expert()
    watched = rng.normal(size=(3, D))
    watched_ids, watched_weights = routing("random", rng, tokens=3)
    kept = []
    for kind in ("random", "one_expert_takes_all"):
        x = rng.normal(size=(T, D))
        ids, expert_weights = routing(kind, rng)
        rows = rng.permutation(T)[:3]
        x[rows], ids[rows], expert_weights[rows] = watched, watched_ids, watched_weights
        x = jnp.asarray(x, jnp.bfloat16)
        arguments = (x, w_gate_up, w_down, ids, expert_weights)
        out = interpreted(*arguments, shared=shared, tile=gathering(SMALL, gathers))
        kept.append(out[rows])
    np.testing.assert_array_equal(kept[0], kept[1])


def test_gathered_rows_give_the_bits_of_copied_ones():
    rng = np.random.default_rng(9)
    arguments = (jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16), *weights())
    routed = routing("random", rng)
    tile = Tile(rows=16, warpgroups=1, block_k=64, stages=3)
    copied, gathered = (
        interpreted(*arguments, *routed, shared=shared_expert(), tile=gathering(tile, gathers))
        for gathers in (False, True)
    )
    np.testing.assert_array_equal(copied, gathered)


GROUPED = [(5, 3, 4), (32, 8, 256), (150, 4, 7)]


def grouping(tokens, choices, experts, *, has_shared=False, seed=10):
    """Returns (ids, valid, options of `spread` and `list_tokens`)."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, experts + 1, (tokens, choices)).astype(np.int32)
    rows = expert_tiles.most_rows(ids.size, experts)
    options = {"num_experts": experts, "rows": rows, "tile_rows": 16, "has_shared": has_shared}
    return ids, rng.random(tokens) < 0.8, options


@pytest.mark.parametrize(("tokens", "choices", "experts"), GROUPED, ids=str)
@pytest.mark.parametrize("has_shared", [False, True], ids=["routed", "with-shared"])
def test_the_list_names_the_token_of_every_row(tokens, choices, experts, has_shared):
    ids, valid, options = grouping(tokens, choices, experts, has_shared=has_shared)
    where, row_tokens = expert_tiles.list_tokens(
        jnp.asarray(ids),
        jnp.asarray(valid),
        **options,
        interpret=kernel_interpreter.interpret_params(),
    )
    used = used_pairs(ids, experts, valid)
    places = np.asarray(where.places).reshape(ids.shape)
    for t, choice in np.argwhere(used):
        assert row_tokens[places[t, choice]] == t
    tiles_of = [-(-np.sum(used & (ids == e)) // 16) for e in range(experts)]
    if has_shared:
        np.testing.assert_array_equal(row_tokens[options["rows"] :][:tokens], np.arange(tokens))
        tiles_of.append(-(-tokens // 16))
    np.testing.assert_array_equal(where.tile_ends, np.cumsum(tiles_of))


@pytest.mark.parametrize(("tokens", "choices", "experts"), GROUPED, ids=str)
def test_spread_copies_a_token_to_its_rows(tokens, choices, experts):
    ids, valid, options = grouping(tokens, choices, experts)
    x = jnp.arange(tokens * 128, dtype=jnp.float32).reshape(tokens, 128)
    where, rows = kernel_interpreter.run(
        expert_tiles.spread, x, jnp.asarray(ids), jnp.asarray(valid), **options
    )
    places = np.asarray(where.places).reshape(ids.shape)
    for t, choice in np.argwhere(used_pairs(ids, experts, valid)):
        np.testing.assert_array_equal(rows[places[t, choice]], x[t])


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [*GROUPED, (600, 8, 16), (550, 8, 256)], ids=str
)
def test_segments_hold_every_pair_once_and_in_order(tokens, choices, experts):
    ids, valid, options = grouping(tokens, choices, experts, seed=7)
    where, _ = expert_tiles.list_tokens(
        jnp.asarray(ids),
        jnp.asarray(valid),
        **options,
        interpret=kernel_interpreter.interpret_params(),
    )
    starts, counts = np.asarray(where.starts), np.asarray(where.counts)
    places = np.asarray(where.places).reshape(ids.shape)
    used = used_pairs(ids, experts, valid)
    seen = np.zeros(experts, int)
    for t, choice in np.ndindex(ids.shape):
        if not used[t, choice]:
            assert places[t, choice] == -1
            continue
        expert = ids[t, choice]
        assert places[t, choice] == starts[expert] + seen[expert]
        seen[expert] += 1
    np.testing.assert_array_equal(counts, seen)
    ends = starts + -(-seen // 8) * 8
    assert np.all(starts % 8 == 0)
    assert np.all(starts[1:] >= ends[:-1])
    assert ends[-1] <= options["rows"]


@pytest.mark.parametrize("has_valid", [False, True], ids=["all-valid", "some-valid"])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(32, 8, 256), (160, 8, 256), (2048, 8, 256), (3, 2, 5), (100, 2, 16), (8192, 8, 1024)],
    ids=str,
)
def test_counting_lowers_for_cuda(tokens, choices, experts, has_valid):
    def run(x, ids, valid):
        options = {
            "num_experts": experts,
            "rows": expert_tiles.most_rows(ids.size, experts),
            "tile_rows": 24,
            "has_shared": True,
        }
        valid = valid if has_valid else None
        return (
            expert_tiles.spread(x, ids, valid, **options),
            expert_tiles.list_tokens(ids, valid, **options),
        )

    shapes = (
        jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, choices), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.bool_),
    )
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in lowered


def serving_arguments(tokens, *, choices=8, experts=256, width=2048, size=512):
    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    return (
        array(jnp.bfloat16, tokens, width),
        array(jnp.bfloat16, experts, 2 * size, width),
        array(jnp.bfloat16, experts, width, size),
        array(jnp.int32, tokens, choices),
        array(jnp.float32, tokens, choices),
    )


def lower(*arguments, **options):
    def run(*arrays):
        return mosaic_gpu.grouped_matmul(*arrays, **options)

    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@both_sources_of_rows
@pytest.mark.parametrize("has_shared", [False, True], ids=["routed", "with-shared"])
@pytest.mark.parametrize("entry", marks.every(3, tiles.entries("grouped_matmul")), ids=str)
def test_every_tuned_tile_lowers(entry, has_shared, gathers):
    tile = gathering(Tile(**entry["tile"]), gathers)
    arguments = serving_arguments(64)
    shared = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in arguments[1:3]] * has_shared

    def run(arrays, shared):
        return mosaic_gpu.grouped_matmul(*arrays, shared=tuple(shared) or None, tile=tile)

    lowered = jax.jit(run).trace(arguments, shared).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 1, "choices": 2, "experts": 16, "width": 128, "size": 64},
        {"tokens": 4, "experts": 128, "size": 768},
        {"tokens": 32, "width": 4096, "size": 1024},
        {"tokens": 1200},
        {"tokens": 8192, "choices": 2, "experts": 16, "size": 192},
    ],
    ids=str,
)
def test_other_shapes_lower_with_the_tuned_tile(sizes):
    assert "mosaic_gpu" in lower(*serving_arguments(**sizes))


@pytest.mark.parametrize("tokens", [256, 4096])
def test_gelu_experts_lower_at_published_sizes(tokens):
    arguments = serving_arguments(tokens, experts=128, width=2816, size=704)
    assert "mosaic_gpu" in lower(*arguments, activation="gelu_tanh")


def test_what_the_kernel_cannot_serve_is_named():
    arguments = [jnp.zeros(a.shape, a.dtype) for a in serving_arguments(2, experts=3, width=192)]
    with pytest.raises(ValueError, match=r"hidden size must be a multiple of 128, not 192"):
        mosaic_gpu.grouped_matmul(*arguments)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        grouped_matmul(*arguments, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="no such tile"):
        Tile(rows=12, warpgroups=1, block_k=64, stages=2)
    with pytest.raises(ValueError, match="gathers takes block_k 64 or 128"):
        Tile(rows=16, warpgroups=1, block_k=256, stages=2, gathers=True)
    with pytest.raises(ValueError, match="shared_memory"):
        lower(
            *serving_arguments(4),
            tile=Tile(rows=128, warpgroups=2, block_k=128, stages=4),
        )
