"""The fingerprint of a model folder changes with what a model reads, and with nothing else."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jdllm.checkpoint import fingerprint

LARGE = 1 << 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "config.json").write_text("{}")
    content = np.random.default_rng(0).bytes(LARGE)
    (tmp_path / "transformer" / "model.safetensors").write_bytes(content)
    return tmp_path


def test_it_is_that_of_the_same_files_elsewhere_and_later(folder, tmp_path_factory):
    found = fingerprint.of_folder(folder)
    other = tmp_path_factory.mktemp("other") / "model"
    os.rename(folder, other)
    os.utime(other / "config.json", (0, 0))
    (other / ".cache").mkdir()
    (other / ".cache" / "lock").write_text("x")
    assert fingerprint.of_folder(other) == found


@pytest.mark.parametrize("place", [0, 100, LARGE - 1])
def test_other_weights_have_another(folder, place):
    found, path = fingerprint.of_folder(folder), folder / "transformer" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert fingerprint.of_folder(folder) != found


def test_a_file_that_grows_moves_or_comes_changes_it(folder):
    seen = [fingerprint.of_folder(folder)]
    with (folder / "config.json").open("a") as file:
        file.write("\n")
    seen.append(fingerprint.of_folder(folder))
    (folder / "config.json").rename(folder / "other.json")
    seen.append(fingerprint.of_folder(folder))
    (folder / "empty").touch()
    seen.append(fingerprint.of_folder(folder))
    assert len(set(seen)) == len(seen)
