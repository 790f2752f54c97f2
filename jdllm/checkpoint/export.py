"""Writes parameters as a Hugging Face safetensors file, the reverse of loading.

The weight table names the part of a parameter that each tensor fills; the export reads the same
parts. It writes the first form of a table (split experts).
"""

from __future__ import annotations

import pathlib
import stat
from collections.abc import Iterable, Mapping

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jdllm.checkpoint import weight_table


def export(
    path: pathlib.Path,
    rows: Iterable[weight_table.WeightRow],
    params: Mapping[str, jax.Array],
) -> None:
    """Writes one safetensors file with every tensor of the table; a full disk is an OSError."""
    form: dict[str, str] = {}
    tensors = {}
    host = {target: np.asarray(array) for target, array in params.items()}
    for row in rows:
        if form.setdefault(row.target, row.form) == row.form:
            tensors[row.name] = np.ascontiguousarray(row.read(host[row.target]))
    is_new = not path.exists()
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        if is_new:
            path.unlink(missing_ok=True)  # nothing, or a torn file
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(mode)  # the library's files are readable by their owner alone
