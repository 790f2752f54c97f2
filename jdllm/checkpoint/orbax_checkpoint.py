"""Converted checkpoints: parameters as the engine holds them, stored with Orbax.

A directory with the marker file is such a checkpoint. `save` writes the marker last. It lists
every parameter and every stored file, so `restore` finds an incomplete copy before it reads the
arrays. Restored arrays go straight to the device, without a transpose or a merge.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jdllm import errors
from jdllm.checkpoint import assemble, source

MARKER_NAME = "jdllm_checkpoint.json"
FORMAT_VERSION = 3  # versions 1 and 2 stored (some) linear weights as [in, out]

GROUP_BYTES = 1 << 30  # of parameters that are restored together: each restore takes 25 ms or more

_PARAMS_DIR = "params"


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Returns whether `save` wrote `directory`."""
    return (directory / MARKER_NAME).is_file()


def save(directory: pathlib.Path, params: Mapping[str, jax.Array], *, dtype: str) -> None:
    """Writes parameters and the marker into an existing directory; else raises an OSError."""
    stored = directory.absolute() / _PARAMS_DIR
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(stored, args=ocp.args.PyTreeSave(_storable(params)))
    except ValueError as error:  # as tensorstore tells that a disk is full
        raise OSError(f"cannot write {stored}: {error}") from error
    marker = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype,
        "parameters": {path: list(array.shape) for path, array in params.items()},
        "files": _file_sizes(stored),
    }
    (directory / MARKER_NAME).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def stored_dtype(directory: pathlib.Path) -> str:
    """Returns the activation dtype the checkpoint was converted to."""
    return _marker(directory)["dtype"]


def check(directory: pathlib.Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises unless the files are complete and hold these parameters; reads no array."""
    marker = _marker(directory)
    _check_files(directory.absolute() / _PARAMS_DIR, marker["files"])
    _check_parameters(directory, marker["parameters"], arrays)


def restore(
    directory: pathlib.Path,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]  # a class that jax assigns
) -> dict[str, jax.Array]:
    """Returns the parameters on `device`, cast to the dtypes of `arrays`."""
    return dict(_restore_groups(directory, [arrays], arrays, device))


def restore_each(
    directory: pathlib.Path,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]  # a class that jax assigns
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the parameters of `restore`, of which it holds at most `GROUP_BYTES`, or one."""
    return _restore_groups(directory, _groups(arrays), arrays, device)


def _groups(
    arrays: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    group, held = {}, 0
    for path, array in arrays.items():
        size = array.size * array.dtype.itemsize
        if group and held + size > GROUP_BYTES:
            yield group
            group, held = {}, 0
        group[path] = array
        held += size
    yield group


def _restore_groups(
    directory: pathlib.Path,
    groups: Iterable[Mapping[str, jax.ShapeDtypeStruct]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> Iterator[tuple[str, jax.Array]]:
    check(directory, arrays)
    stored = directory.absolute() / _PARAMS_DIR
    sharding = jax.sharding.SingleDeviceSharding(device)
    for group in groups:
        targets = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for path, array in group.items()
        }
        try:
            storable = _storable(targets)
            restore_args = ocp.checkpoint_utils.construct_restore_args(storable)
            with _checkpointer() as checkpointer:
                restored = checkpointer.restore(
                    stored,
                    args=ocp.args.PyTreeRestore(
                        storable, restore_args=restore_args, partial_restore=True
                    ),
                )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise errors.ConfigError(f"{stored} cannot be restored: {error}") from error
        for path in group:
            yield path, restored.pop(_key(path))


def restore_placed_each(
    directory: pathlib.Path, arrays: Mapping[str, jax.ShapeDtypeStruct], place: assemble.Place
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the parameters one by one, cast to the dtypes of `arrays`, where `place` puts them.

    The host holds one parameter at a time, and no device need ever hold a whole one. Stored arrays
    are one chunk each, so reading a part of one would take as long as reading all of it.
    """
    check(directory, arrays)
    stored = directory.absolute() / _PARAMS_DIR
    for path, array in arrays.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(stored / _key(path))}}
        try:
            found = tensorstore.open(spec, open=True, read=True).result().read().result()
        except (ValueError, OSError) as error:
            raise errors.ConfigError(f"{stored} cannot be restored: {error}") from error
        yield from place(path, np.asarray(found).astype(array.dtype, copy=False)).items()


def _checkpointer() -> ocp.Checkpointer:
    # Weights do not compress, and plain zarr files load 2 to 3 times as fast as the default.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    return ocp.Checkpointer(handler)


def _key(path: str) -> str:
    # Orbax joins its own key paths with dots.
    return path.replace(".", "-")


def _storable(params: Mapping[str, Any]) -> dict[str, Any]:
    return {_key(path): value for path, value in params.items()}


def _marker(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / MARKER_NAME
    marker = source.read_json(path)
    if marker.get("format_version") != FORMAT_VERSION:
        raise errors.ConfigError(
            f"{path} has format_version {marker.get('format_version')!r}, this version reads "
            f"{FORMAT_VERSION}; convert the original checkpoint again"
        )
    lost = sorted({"dtype", "parameters", "files"} - marker.keys())
    if lost:
        raise errors.ConfigError(f"{path} lacks {', '.join(lost)}; convert the checkpoint again")
    return marker


def _file_sizes(stored: pathlib.Path) -> dict[str, int]:
    files = (path for path in sorted(stored.rglob("*")) if path.is_file())
    return {path.relative_to(stored).as_posix(): path.stat().st_size for path in files}


def _check_files(stored: pathlib.Path, expected: Mapping[str, int]) -> None:
    found = _file_sizes(stored)
    torn = [name for name, size in expected.items() if found.get(name) != size]
    if torn:
        raise errors.ConfigError(
            f"{stored} is incomplete: {len(torn)} of {len(expected)} files are missing or have "
            f"another size than at conversion, e.g. {torn[0]}; copy or convert it again"
        )


def _check_parameters(
    directory: pathlib.Path,
    stored: Mapping[str, list[int]],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    wanted = {path: list(array.shape) for path, array in arrays.items()}
    if stored == wanted:
        return
    wrong = sorted(
        path for path in stored.keys() | wanted.keys() if stored.get(path) != wanted.get(path)
    )
    lines = [f"  {p}: stored {stored.get(p)}, expected {wanted.get(p)}" for p in wrong[:20]]
    raise errors.ConfigError(
        "\n".join([f"{directory} does not fit its config.json; {len(wrong)} arrays differ", *lines])
    )
