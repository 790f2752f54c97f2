"""Writing weights: what fits is read back, and a full disk is an error that names the file."""

import os

import numpy as np
import pytest
import safetensors.numpy
from support import full_disk

from jdllm.checkpoint import export, weight_table

ROWS = [weight_table.WeightRow(name=f"t{i}", shape=(64,), target=f"p{i}") for i in range(4)]
PARAMS = {f"p{i}": np.arange(64.0) + i for i in range(4)}


def test_tensors_are_those_of_the_table(tmp_path):
    export.export(tmp_path / "model.safetensors", ROWS, PARAMS)
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert found.keys() == {row.name for row in ROWS}
    for i in range(4):
        assert np.array_equal(found[f"t{i}"], PARAMS[f"p{i}"])


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    with (
        full_disk.largest_file(1000),
        pytest.raises(OSError, match=r"cannot write .*model\.safetensors"),
    ):
        export.export(tmp_path / "model.safetensors", ROWS, PARAMS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_the_file_as_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        export.export(tmp_path / "model.safetensors", ROWS, PARAMS)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
