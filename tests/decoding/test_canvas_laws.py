"""What holds for every canvas algorithm: rows are alone, finished rows rest, shapes stay."""

import dataclasses

import jax
import numpy as np
import pytest
from support import canvas_rows

from jdllm import decoding
from jdllm.algorithms import lookup
from jdllm.decoding.canvas.interface import CanvasParams, Window

S, R, END = 40, 10, 5
OPTIONS = {
    "FullAttnMultiBlock": [
        {"block_length": 5, "cache_mode": "delayed"},
        {"block_length": 7, "cache_mode": "window", "cache_delay_iter": 1},
        {"early_stop": False, "threshold": 0.2},
    ],
    "EntropyThreshold": [{"block_length": 6}, {"threshold": 0.1}, {"block_length": 1}],
    "LLaDA": [{"steps": 9, "block_length": 9}, {"remasking": "random"}, {"steps": 3}],
    "Dream": [{"steps": 7}, {"alg": "entropy", "alg_temp": 0.4}, {"alg": "maskgit_plus"}],
    "FastDLLM": [
        {"block_length": 6, "cache_mode": "dual"},
        {"factor": 0.7, "cache_mode": "prefix", "block_length": 9},
        {"steps": 12},
    ],
}
every_algorithm = pytest.mark.parametrize("algorithm", OPTIONS)


def make_rows(algorithm, seed=0):
    rng = np.random.default_rng(seed)
    return [
        canvas_rows.random_row(
            rng, S - 4, algorithm, end_ids=(END,), options=OPTIONS[algorithm][i % 3]
        )
        for i in range(R)
    ]


def trace(algorithm, rows, S, columns, *, is_shifted=False):
    """Returns per forward (low, high, tokens, masked), row r with column `columns[r]`'s fields."""

    def propose(forward, _):
        wide = canvas_rows.random_fields(11, forward, R, 64)
        return {name: values[columns][:, :S] for name, values in wide.items()}

    steps = canvas_rows.forwards(algorithm, rows, S, propose, is_shifted=is_shifted)
    found = []
    for window, _, canvas in steps:
        if window is not None:
            found.append((window.low, window.high, canvas.tokens, canvas.masked))
    return found


def assert_same_rows(ours, others, places):
    """Row i of `ours` is row places[i] of `others`, as far as either has forwards."""
    for i, place in enumerate(places):
        mine = [tuple(part[i] for part in step) for step in ours if step[1][i]]
        theirs = [tuple(part[place] for part in step) for step in others if step[1][place]]
        assert len(mine) == len(theirs) > 0
        for a, b in zip(mine, theirs, strict=True):
            assert a[:2] == b[:2]
            width = min(len(a[2]), len(b[2]))
            np.testing.assert_array_equal(a[2][:width], b[2][:width])
            np.testing.assert_array_equal(a[3][:width], b[3][:width])


@every_algorithm
def test_a_row_is_the_same_alone_elsewhere_and_on_a_longer_canvas(algorithm):
    rows = make_rows(algorithm)
    together = trace(algorithm, rows, S, np.arange(R))
    order = np.random.default_rng(1).permutation(R)
    permuted = trace(algorithm, [rows[r] for r in order], S, order)
    assert_same_rows(permuted, together, order)
    alone = trace(algorithm, rows[:1], S, np.arange(1))
    assert_same_rows(alone, together, [0])
    longer = trace(algorithm, rows[2:3], 56, np.array([2]))
    assert_same_rows(longer, together, [2])


@every_algorithm
def test_finished_rows_never_change(algorithm):
    finished = {}
    rows = make_rows(algorithm, seed=2)

    def propose(forward, _):
        return canvas_rows.random_fields(5, forward, R, S)

    for _, planned, canvas in canvas_rows.forwards(algorithm, rows, S, propose):
        for state in (planned, canvas):
            for r in np.flatnonzero(state.is_done):
                finished.setdefault(r, (state.tokens[r], state.step[r]))
                np.testing.assert_array_equal(state.tokens[r], finished[r][0])
                assert state.step[r] == finished[r][1] and not state.masked[r].any()
    assert len(finished) == R


@every_algorithm
def test_a_row_that_came_as_done_rests_though_it_has_masks(algorithm):
    rows = make_rows(algorithm, seed=3)
    plan, update = canvas_rows.compiled(algorithm)
    canvas = canvas_rows.make_canvas(algorithm, rows, S)
    stopped = np.arange(R) % 2 == 0
    canvas = dataclasses.replace(canvas, is_done=jax.numpy.asarray(stopped))
    planned, window = canvas_rows.as_numpy(plan(canvas))
    assert (window.high[stopped] == 0).all() and (window.high[~stopped] > 0).all()
    assert not window.wanted[stopped].any() and not window.is_full[stopped].any()
    everything = dataclasses.replace(window, wanted=planned.masked)
    fields = canvas_rows.random_fields(0, 0, R, S)
    written = update(planned, canvas_rows.made_proposal(planned, everything, fields))
    for state in (planned, written):
        np.testing.assert_array_equal(state.tokens[stopped], canvas.tokens[stopped])
        np.testing.assert_array_equal(state.masked[stopped], canvas.masked[stopped])


@every_algorithm
def test_what_is_given_stays(algorithm):
    for seed in range(4):
        rows = make_rows(algorithm, seed=seed)
        last, _, _ = canvas_rows.run(
            algorithm, rows, S, lambda forward, _: canvas_rows.random_fields(2, forward, R, S)
        )
        for r, row in enumerate(rows):
            for i, token in enumerate(row.text):
                assert token is None or last.tokens[r, i] == token
        assert not (last.tokens == canvas_rows.MASK).any(), "everything is written"


@every_algorithm
@pytest.mark.parametrize("is_shifted", [False, True])
def test_plan_and_update_keep_every_shape_and_type(algorithm, is_shifted):
    # The loop carries the canvas: a changed type, even a weak one, would not compile.
    rule = decoding.canvas_algorithm(algorithm, is_shifted=is_shifted)
    rows = make_rows(algorithm)
    canvas = canvas_rows.make_canvas(algorithm, rows, S, is_shifted=is_shifted)
    canvas = jax.tree.map(jax.numpy.asarray, canvas)
    aval = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type)  # noqa: E731
    before = jax.tree.map(aval, canvas, is_leaf=lambda leaf: hasattr(leaf, "dtype"))
    planned, window = jax.eval_shape(rule.plan, canvas)
    fields = canvas_rows.random_fields(0, 0, R, S)
    proposal = canvas_rows.made_proposal(
        canvas_rows.as_numpy(canvas), Window(low=0, high=0, wanted=True, is_full=0),
        fields,
    )  # fmt: skip
    written = jax.eval_shape(rule.update, planned, proposal)
    for after in (planned, written):
        assert jax.tree.map(aval, after, is_leaf=lambda leaf: hasattr(leaf, "dtype")) == before
    expected = {"low": "int32", "high": "int32", "wanted": "bool", "is_full": "bool"}
    for name, dtype in expected.items():
        leaf = getattr(window, name)
        assert (leaf.dtype, leaf.weak_type) == (np.dtype(dtype), False)
    assert hash(rule) == hash(decoding.canvas_algorithm(algorithm, is_shifted=is_shifted))


def test_the_table_is_that_of_the_options():
    names = set(decoding.CANVAS_ALGORITHMS)
    others = set(decoding.BLOCK_ALGORITHMS) | set(decoding.UNIFORM_ALGORITHMS)
    assert names | others == set(lookup.TABLE)
    assert not names & set(decoding.BLOCK_ALGORITHMS)
    with pytest.raises(ImportError, match="without a rule.*: Dream, LLaDA; see"):
        decoding.check_names(lookup.CANVAS, names - {"Dream", "LLaDA"})
    with pytest.raises(ImportError, match="not declared: Toy; see"):
        decoding.check_names(lookup.CANVAS, names | {"Toy"})
    options = {name for names in OPTIONS for name in lookup.TABLE[names].defaults}
    fields = {field.name for field in dataclasses.fields(CanvasParams)}
    assert options <= fields, "every option reaches the device"
    multi_block = [
        decoding.canvas_algorithm("FullAttnMultiBlock", is_shifted=shifted)
        for shifted in (False, True)
    ]
    assert multi_block[0] != multi_block[1]
