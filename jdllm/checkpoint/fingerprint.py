"""A short name for what a model folder holds, so that results of other weights are told apart."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator

_RUN_NAME = "run.json"  # of the folder of an evaluation or a training, maybe inside the model's
_WHOLE = 1 << 24  # bytes of files that are read whole
_BLOCKS, _BLOCK = 256, 1 << 12  # of larger ones: so many blocks, evenly spaced, of so many bytes
_DIGITS = 16


def of_folder(directory: pathlib.Path) -> str:
    """Returns hexadecimal digits that change with the files of a folder.

    Of files above 16 MiB it reads a sample, so that large checkpoints take no time: weights that
    differ in few places may have the same digits. Hidden files, notes (.md) and folders of runs do
    not count.
    """
    digest = hashlib.sha256()
    for path in _files(directory):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                digest.update(file.read())
                continue
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:_DIGITS]


def _files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields files in an order that is the same everywhere."""
    for place, folders, names in os.walk(directory):
        folder = pathlib.Path(place)
        if folder != directory and _RUN_NAME in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = folder / name
            if not name.startswith(".") and path.suffix != ".md" and path.is_file():
                yield path
