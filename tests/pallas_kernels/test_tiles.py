"""Tile tables: the first entry whose conditions hold is taken, and broken files are refused."""

import json

import pytest

from pallas_kernels import tiles

TABLE = [
    {"when": {"tokens": 8}, "equal": {"columns": 32}, "tile": {"rows": 1}},
    {"when": {"tokens": 16}, "equal": {"columns": 32}, "tile": {}},
    {"when": {}, "equal": {"columns": 48}, "tile": {"rows": 2}},
    {"when": {"tokens": 8}, "tile": {"rows": 3}},
    {"when": {}, "tile": {"rows": 4}},
]


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Returns a function that makes a list the default device's table of "op"."""
    monkeypatch.setattr(tiles, "OPS_DIR", tmp_path)
    path = tiles.path_of("op", tiles.DEFAULT_DEVICE)
    path.parent.mkdir(parents=True)

    def put(table):
        path.write_text(json.dumps(table))

    return put


@pytest.mark.parametrize(
    ("tokens", "columns", "tile"),
    [
        (8, 32, {"rows": 1}),
        (9, 32, {}),
        (17, 32, {"rows": 4}),
        (99, 48, {"rows": 2}),
        (8, 40, {"rows": 3}),
        (9, 40, {"rows": 4}),
    ],
)
def test_the_first_entry_whose_bounds_and_values_hold_is_taken(write, tokens, columns, tile):
    write(TABLE)
    assert tiles.lookup("op", tokens=tokens, columns=columns) == tile


@pytest.mark.parametrize(
    "table",
    [
        [],
        [{"when": {}}],
        [{"when": {}, "tile": {}, "unless": {}}],
        [{"when": {"tokens": 8}, "tile": {}}],
        [{"when": {}, "equal": {"tokens": 8}, "tile": {}}],
    ],
)
def test_a_table_that_would_leave_sizes_out_is_refused(write, table):
    write(table)
    with pytest.raises(
        ValueError, match=r"op/tiles/nvidia_h200.json: a list of when/equal/tile entries"
    ):
        tiles.entries("op")
