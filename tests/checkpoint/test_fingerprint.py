"""The fingerprint of a model folder changes with its files, wherever it lies."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jdllm.checkpoint import fingerprint

SMALL, LARGE = 1 << 20, (1 << 24) + 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "config.json").write_text("{}")
    random = np.random.default_rng(0)
    for name, size in (("model", SMALL), ("large", LARGE)):
        path = tmp_path / "transformer" / f"{name}.safetensors"
        path.write_bytes(random.bytes(size))
    return tmp_path


def test_it_is_that_of_the_same_files_elsewhere_and_later(folder, tmp_path_factory):
    found = fingerprint.of_folder(folder)
    other = tmp_path_factory.mktemp("other") / "model"
    os.rename(folder, other)
    os.utime(other / "config.json", (0, 0))
    (other / ".cache").mkdir()
    (other / ".cache" / "lock").write_text("x")
    (other / "README.md").write_text("a note")
    (other / "results" / "pictures").mkdir(parents=True)
    for name in ("run.json", "samples.jsonl", "pictures/0.png"):
        (other / "results" / name).write_text("of an evaluation")
    assert fingerprint.of_folder(other) == found


@pytest.mark.parametrize("place", [0, 100, SMALL // 2, SMALL - 1])
def test_one_other_bit_of_a_small_file_changes_it(folder, place):
    assert fingerprint.of_folder(folder) != changed(folder, "model", slice(place, place + 1))


@pytest.mark.parametrize("start", [0.0, 0.3, 0.5, 0.99])
def test_a_changed_part_of_a_large_file_changes_it(folder, start):
    """A hundredth of it is more than the distance of two blocks."""
    first = int(start * LARGE)
    assert fingerprint.of_folder(folder) != changed(
        folder, "large", slice(first, first + LARGE // 100)
    )


def changed(folder, name, part):
    path = folder / "transformer" / f"{name}.safetensors"
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[part] ^= 1
    path.write_bytes(content.tobytes())
    return fingerprint.of_folder(folder)


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
