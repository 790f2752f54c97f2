"""Reads safetensors checkpoints, one file or several, tensor by tensor.

The library's numpy reader does not support bfloat16, so this module reads the header itself (a
length and a JSON object). Tensors are views of a memory map: nothing is copied until a tensor
fills its parameter.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from jdllm import errors
from jdllm.checkpoint import source, weight_files

_MODEL = weight_files.BASE_NAMES["transformers"]

# The dtypes of weights that are read, by their names in the files.
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LARGEST = np.dtype(np.float32)  # of the dtypes that models compute in
# Bits of a value. Tensors of these dtypes, and of newer ones, may be there if nothing reads them.
_BITS = {name: 8 * dtype.itemsize for name, dtype in _DTYPES.items()} | {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
_LENGTH_BYTES = 8


class SafetensorsSource:
    """The tensors of a checkpoint directory: `shapes` gives all shapes, `read` one tensor.

    The index, `{base_name}.safetensors.index.json`, names the files. Without one, the checkpoint is
    `{base_name}.safetensors` or else its shards (`weight_files`). With no `base_name` these are the
    files of `model`, or else every safetensors file.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        base_name: str | None = None,
        variant: str | None = None,
    ):
        indexes = [directory / name for name in weight_files.indexes(base_name or _MODEL, variant)]
        index = next((path for path in indexes if path.is_file()), indexes[0])
        weight_map = _weight_map(index)
        files = _shards(index, weight_map) or _files(directory, base_name, variant)
        self._tensors: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        self._files: dict[str, pathlib.Path] = {}
        for path in files:
            self._add_file(path, weight_map)
        lost = sorted(weight_map.keys() - self._tensors.keys())
        if lost:
            raise errors.ConfigError(
                f"{index} names tensors that their files lack: "
                f"{', '.join(lost[:20])} ({len(lost)} in all)"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name."""
        return {name: tuple(info["shape"]) for name, (_, info) in self._tensors.items()}

    @property
    def unread_dtypes(self) -> dict[str, str]:
        """The dtypes, by tensor, that `read` does not know; the files call them so."""
        dtypes = {name: info["dtype"] for name, (_, info) in self._tensors.items()}
        return {name: dtype for name, dtype in dtypes.items() if dtype not in _DTYPES}

    def main_dtype(self, names: Iterable[str]) -> np.dtype:
        """Returns the dtype of most values of these tensors; float64 counts as float32."""
        values: dict[np.dtype, int] = {}
        for info in (self._tensors[name][1] for name in names):
            dtype = min(_DTYPES[info["dtype"]], _LARGEST, key=lambda one: one.itemsize)
            values[dtype] = values.get(dtype, 0) + math.prod(info["shape"])
        return max(values, key=values.__getitem__)

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of one tensor in its stored dtype, none of `unread_dtypes`."""
        data, info = self._tensors[name]
        begin, end = info["data_offsets"]
        return data[begin:end].view(_DTYPES[info["dtype"]]).reshape(info["shape"])

    def _add_file(self, path: pathlib.Path, weight_map: dict[str, str]) -> None:
        header, offset = _read_header(path)
        data = np.memmap(path, np.uint8, mode="r")[offset:]
        for name, info in header.items():
            if weight_map.get(name, path.name) != path.name:
                continue
            if name in self._tensors:
                raise errors.ConfigError(f"{name} is in {self._files[name]} and in {path}")
            self._tensors[name] = (data, info)
            self._files[name] = path


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    weight_map = source.read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise errors.ConfigError(f"{path} has no weight_map")
    for tensor, name in weight_map.items():
        # A name, not a path: a checkpoint must not read files outside its folder.
        if not isinstance(name, str) or not name or pathlib.PurePath(name).name != name:
            raise errors.ConfigError(
                f"{path}: weight_map[{errors.quote(tensor)}]={errors.quote(name)} is no file name"
            )
    return weight_map


def _shards(index: pathlib.Path, weight_map: dict[str, str]) -> list[pathlib.Path]:
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    lost = [path.name for path in files if not path.is_file()]
    if lost:
        raise errors.ConfigError(f"{index} names shards that do not exist: {', '.join(lost)}")
    return files


def _files(
    directory: pathlib.Path, base_name: str | None, variant: str | None
) -> list[pathlib.Path]:
    names = weight_files.names_in(directory)
    found = weight_files.chosen(names, base_name or _MODEL, variant)
    if base_name is None and not found:
        found = [name for name in names if name.endswith(".safetensors")]
    if not found:
        wanted = ["*.safetensors"]
        if base_name is not None:
            wanted = weight_files.patterns(base_name, variant)
        advice = weight_files.advice(names, base_name)
        raise errors.ConfigError(f"{directory} holds no {' or '.join(wanted)} file{advice}")
    return [directory / name for name in found]


def _read_header(path: pathlib.Path) -> tuple[dict[str, dict[str, Any]], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise errors.ConfigError(f"{path} is truncated or no safetensors file ({size} bytes)")
        text = file.read(length)
    offset = _LENGTH_BYTES + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        spans = sorted(_span(path, name, info) for name, info in header.items())
    except errors.ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.ConfigError(f"{path} has a corrupt safetensors header: {error}") from error
    # Tensors lie end to end, so this check finds a file that lost or gained bytes anywhere.
    ends = [0, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size - offset:
        raise errors.ConfigError(
            f"{path} is truncated or corrupt: its header describes {ends[-1]} bytes of tensors, "
            f"the file holds {size - offset}"
        )
    return header, offset


def _span(path: pathlib.Path, name: str, info: dict[str, Any]) -> tuple[int, int]:
    begin, end = info["data_offsets"]
    if not isinstance(info["dtype"], str):
        raise errors.ConfigError(f"{path}: the dtype of {errors.quote(name)} is no text")
    if not all(type(size) is int and size >= 0 for size in (begin, end, *info["shape"])):
        raise errors.ConfigError(
            f"{path}: {errors.quote(name)} has sizes that are no integers >= 0"
        )
    bits = _BITS.get(info["dtype"])
    if bits is not None and 8 * (end - begin) != math.prod(info["shape"]) * bits:
        raise errors.ConfigError(
            f"{path}: {errors.quote(name)} has offsets that do not fit its shape"
        )
    return begin, end
