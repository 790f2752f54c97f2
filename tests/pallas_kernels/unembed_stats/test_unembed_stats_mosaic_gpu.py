"""The unembedding kernel equals the XLA implementation and numpy, and lowers for CUDA."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from pallas_kernels import tiles
from pallas_kernels.hopper import compat
from pallas_kernels.unembed_stats import api, mosaic_gpu, partials, reference
from pallas_kernels.unembed_stats.mosaic_gpu import Plan, UnembedTile

if not compat.supported():
    pytest.skip("needs the Mosaic GPU of a newer jax", allow_module_level=True)

from support import kernel_interpreter

D = 128
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # float32 sums of 128 products of bfloat16
BY_COLUMNS = UnembedTile(columns=32, split="columns", stages=2, sms=3)
BY_ROWS = UnembedTile(columns=32, stages=3, sms=3)
PAIR = UnembedTile(columns=32, pair=True, stages=2, sms=4)
TEAMS = UnembedTile(columns=32, split="columns", stages=3, sms=5, teams=2)


def problem(T, V, *, seed=0, exact=False):
    """With `exact` no sum rounds: a CPU chooses the order of the sums by a row's place."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(T, D)) * 0.3
    w = rng.normal(size=(V, D))
    if exact:
        x, w = np.round(8 * x) / 8, np.round(8 * w) / 8
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), rng


def all_rows(rng, T, V):
    """Returns every per-row input; the first rows have the vocabulary's ends and no given id."""
    given = rng.integers(0, V, T)
    given[:4] = 0, V - 1, V, -1
    first, second = partials.draw_words(jnp.asarray(rng.integers(0, 2**32, (T, 2)), jnp.uint32))
    return {
        "given_ids": jnp.asarray(given, jnp.int32),
        "draw_first": first,
        "draw_second": second,
        "inverse_temperature": jnp.asarray(rng.uniform(0.3, 3, T), jnp.float32),
    }


def interpreted(x, w, rows, tile, forbidden=(), num_rows=None, first_id=None):
    if num_rows is not None:
        num_rows = jnp.int32(num_rows)
    return kernel_interpreter.run(
        mosaic_gpu.partial_stats,
        x,
        w,
        rows,
        forbidden_ids=forbidden,
        num_rows=num_rows,
        first_id=None if first_id is None else jnp.int32(first_id),
        tile=tile,
    )


def finish(partial):
    return api._finish(partial, jnp.zeros(partial.high.shape, bool))


def check(found, expected):
    for name in api.UnembedStats.__dataclass_fields__:
        left, right = np.asarray(getattr(found, name)), np.asarray(getattr(expected, name))
        assert left.dtype == right.dtype
        if name.endswith("_id"):
            np.testing.assert_array_equal(left, right, err_msg=name)
        else:
            np.testing.assert_allclose(left, right, **TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    "T, V, tile, forbidden",
    marks.every(
        3,
        [
            (41, 300, BY_COLUMNS, (3, 298)),
            (70, 200, BY_ROWS, ()),
            (130, 190, PAIR, (0,)),
            (150, 200, BY_COLUMNS, (3,)),
            (140, 200, BY_ROWS, ()),
            (300, 100, PAIR, (0,)),
            (150, 200, TEAMS, ()),
        ],
    ),
    ids=[
        "by_columns",
        "by_rows",
        "pair",
        "groups_by_columns",
        "groups_by_rows",
        "groups_of_pairs",
        "teams",
    ],
)
def test_equals_the_xla_implementation(T, V, tile, forbidden):
    x, w, rng = problem(T, V)
    rows = all_rows(rng, T, V)
    expected = reference.partial_stats(x, w, rows, forbidden, None)
    check(finish(interpreted(x, w, rows, tile, forbidden)), finish(expected))


@pytest.mark.parametrize("names", [("given_ids",), (), None], ids=["given", "alone", "drawn"])
@pytest.mark.parametrize("tile", [BY_COLUMNS, BY_ROWS], ids=["by_columns", "by_rows"])
def test_parts_of_the_vocabulary_merge_to_the_whole(tile, names):
    """Forbidden ids lie in two of three parts; ids, draws and given logits are the whole's."""
    T, V, forbidden = 41, 300, (3, 150, 298)
    x, w, rng = problem(T, V)
    rows = all_rows(rng, T, V)
    if names is not None:
        rows = {name: rows[name] for name in names}
    found = [
        interpreted(x, w[first : first + 100], rows, tile, forbidden, first_id=first)
        for first in (0, 100, 200)
    ]
    expected = reference.partial_stats(x, w, rows, forbidden, None)
    check(finish(functools.reduce(partials.merge, found)), finish(expected))


def test_greedy_equals_numpy_with_ties_within_and_across_tiles():
    """The logits are whole numbers, so they are exact, and dozens of ids share each value."""
    rng = np.random.default_rng(1)
    x = np.eye(5, D)
    w = rng.integers(0, 3, (150, D))
    found = finish(
        interpreted(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), {}, BY_COLUMNS)
    )
    logits = w[:, :5].T
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(found.best_id, order[:, 0])
    np.testing.assert_array_equal(found.second_id, order[:, 1])
    np.testing.assert_array_equal(found.best_logit, 2)
    np.testing.assert_allclose(found.logsumexp, np.log(np.exp(logits * 1.0).sum(1)), rtol=1e-6)
    np.testing.assert_array_equal(found.drawn_id, found.best_id)


def test_neighbours_and_their_nan_change_no_bit():
    """Neighbours have other hidden states, NaN, other given ids (so other tiles have masks)."""
    T, V = 6, 150
    x, w, rng = problem(T, V, exact=True)
    rows = all_rows(rng, T, V)
    mine = interpreted(x, w, rows, BY_COLUMNS)
    others = x.at[1:].set(jnp.nan)
    others = jnp.concatenate([others, jnp.full((2, D), jnp.nan, x.dtype)])
    changed = {
        name: jnp.concatenate([value[:1], jnp.flip(value[1:]), value[:2]])
        for name, value in rows.items()
    }
    changed["given_ids"] = changed["given_ids"].at[1:].set(77)
    other = interpreted(others, w, changed, BY_COLUMNS)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    assert np.isnan(finish(other).logsumexp[1:]).all()
    assert np.isnan(finish(other).best_logit[1:]).all()


@pytest.mark.parametrize("num_rows", marks.every(3, [0, 1, 64, 65, 150, 2**31 - 1, -5]))
def test_place_and_number_of_rows_change_no_bit(num_rows):
    """In another order rows are in other groups; groups that are not computed hold NaN."""
    T, V = 150, 150
    x, w, rng = problem(T, V, exact=True)
    rows = all_rows(rng, T, V)
    order = rng.permutation(T)
    expected = _every_row(BY_COLUMNS)
    moved = {name: value[order] for name, value in rows.items()}
    found = interpreted(x[order], w, moved, BY_COLUMNS, num_rows=num_rows)
    wanted = min(max(num_rows, 0), T)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a[:wanted], np.asarray(b)[order][:wanted])


@functools.cache
def _every_row(tile):
    x, w, rng = problem(150, 150, exact=True)
    return interpreted(x, w, all_rows(rng, 150, 150), tile)


@pytest.mark.parametrize("tile, T", marks.every(3, [(BY_ROWS, 270), (PAIR, 260), (TEAMS, 200)]))
@pytest.mark.parametrize("num_rows", [0, 100, 257])
def test_groups_behind_num_rows_are_not_computed(tile, T, num_rows):
    """The groups before do not change. The interpreter fills unwritten memory with NaN."""
    V = 70
    x, w, rng = problem(T, V)
    rows = {"given_ids": jnp.asarray(rng.integers(0, V, T), jnp.int32)}
    group_rows = 64 * (2 if tile.split == "rows" else 1) * (2 if tile.pair else 1)
    computed = min(-(-num_rows // group_rows) * group_rows, T)
    some = interpreted(x, w, rows, tile, num_rows=num_rows)
    every = interpreted(x, w, rows, tile)
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(every), strict=True):
        np.testing.assert_array_equal(a[:computed], b[:computed])
    assert np.isnan(some.total[computed:]).all()
    assert not np.isnan(every.total).any()


LOWERED = [
    (32, False),
    (128, False),
    (512, False),
    (2048, False),
    (32, True),
    (128, True),
    (512, True),
]


@pytest.mark.parametrize("has_num_rows", [False, True], ids=["all_rows", "num_rows"])
@pytest.mark.parametrize("T, draws", marks.every(4, LOWERED))
def test_every_tile_of_the_table_lowers_for_cuda(T, draws, has_num_rows):
    V, width = (157_184, 2048) if T > 32 else (126_464, 4096)
    shape = jax.ShapeDtypeStruct
    rows = {"given_ids": shape((T,), jnp.int32)}
    if draws:
        rows |= {
            "draw_first": shape((T,), jnp.uint32),
            "draw_second": shape((T,), jnp.uint32),
            "inverse_temperature": shape((T,), jnp.float32),
        }

    def op(x, w, rows, num_rows):
        return mosaic_gpu.partial_stats(x, w, rows, forbidden_ids=(V - 1,), num_rows=num_rows)

    num_rows = shape((), jnp.int32) if has_num_rows else None
    arguments = (shape((T, width), jnp.bfloat16), shape((V, width), jnp.bfloat16), rows, num_rows)
    traced = jax.jit(op).trace(*arguments)
    # In a separate thread: a lowering makes thousands of calls. They are three times as slow if
    # Python's stack crosses a chunk of its memory, and under pytest it does.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lowered = pool.submit(traced.lower, lowering_platforms=("cuda",)).result()
    assert "mosaic_gpu" in lowered.as_text()


def test_the_lowered_shapes_take_every_entry_of_the_table():
    entries = tiles.entries("unembed_stats")
    taken = [tiles.lookup("unembed_stats", tokens=T, draws=int(draws)) for T, draws in LOWERED]
    assert all(entry["tile"] in taken for entry in entries)


@pytest.mark.parametrize("T", [1, 64, 65, 128, 200, 256, 300, 512, 1024, 2048, 20_000])
@pytest.mark.parametrize("V", [20, 50_257, 126_464, 151_936, 157_184])
def test_the_tiles_cover_the_vocabulary_and_fit_shared_memory(T, V):
    tile = mosaic_gpu.table_tile(T, draws=False)
    plan = Plan(
        tile=tile, T=T, V=V, D=2048, dtype=jnp.dtype(jnp.bfloat16), forbidden_ids=(), row_names=()
    )
    assert plan.columns % 16 == 0 and plan.columns <= tile.columns
    assert (plan.num_tiles - 1) * plan.tile_columns < V <= plan.num_tiles * plan.tile_columns
    assert 1 <= plan.workers <= plan.num_tiles
    assert plan.teams * plan.workers * plan.cluster <= tile.sms
    assert T <= plan.padded_rows < T + plan.group_rows
    stage = (plan.cta_rows + plan.tile_columns) * mosaic_gpu.DEPTH * 2
    assert tile.stages * stage + 12 * 1024 <= 227 * 1024


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"dtype": jnp.float32, "hidden_size": 128}, "bfloat16 or float16"),
        ({"dtype": jnp.bfloat16, "hidden_size": 100}, "hidden size"),
        ({"dtype": jnp.bfloat16, "hidden_size": 128, "num_forbidden": 17}, "forbidden"),
    ],
    ids=["dtype", "width", "forbidden"],
)
def test_what_it_cannot_serve_is_said(facts, message):
    assert message in mosaic_gpu.why_not(**facts)


def test_a_forced_shape_that_it_cannot_serve_is_printed():
    x, w = jnp.zeros((3, 100), jnp.bfloat16), jnp.zeros((50, 100), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"hidden size.*\(3, 100\).*\(50, 100\)"):
        mosaic_gpu.partial_stats(x, w, {})


@pytest.mark.parametrize(
    "wrong", [{"columns": 24}, {"columns": 272}, {"stages": 1}, {"sms": 1}, {"teams": 0}]
)
def test_bad_tiles_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        UnembedTile(**wrong)
