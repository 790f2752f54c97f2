"""A short name for what a model folder holds, so that results of other weights are told apart."""

from __future__ import annotations

import hashlib
import pathlib

_ENDS = 1 << 16  # bytes at the beginning and at the end of a file
_DIGITS = 16


def of_folder(directory: pathlib.Path) -> str:
    """Returns hexadecimal digits that change with the files of a folder, hidden ones excepted.

    Of each it reads the ends and the size only, so that large checkpoints take no time: training
    changes weights everywhere.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{name.as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()[:_DIGITS]
