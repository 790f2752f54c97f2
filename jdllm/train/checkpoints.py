"""Saves and restores a run: with orbax to resume it, as npz parts to carry weights elsewhere.

Orbax writes into a temporary folder and renames it. So a run that is killed at any moment
resumes from its last complete checkpoint, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jdllm import errors
from jdllm.train import clock, recipe

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 15 * 2**20
StateT = typing.TypeVar("StateT", bound=recipe.State)


def manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    """Returns the run's checkpoint manager, which keeps the last two checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def newest(folder: pathlib.Path) -> int | None:
    """Returns the step of the newest complete checkpoint in a manager's folder, or None."""
    # One that is being written has a name with more than digits.
    steps = (int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    return max(steps, default=None)


class WriteError(RuntimeError):
    """Says that a checkpoint could not be written; those that were complete before still are."""


def save(checkpoints: ocp.CheckpointManager, state: recipe.State, passed: clock.Passed) -> None:
    """Starts writing a checkpoint of the state's step; a second save waits for the first.

    So a `WriteError` may be that of the save before.
    """
    number = int(state.step)
    with _write_errors(checkpoints):
        if number != checkpoints.latest_step():
            checkpoints.save(
                number,
                args=ocp.args.StandardSave(state),
                custom_metadata=dataclasses.asdict(passed),
            )


def save_now(checkpoints: ocp.CheckpointManager, state: recipe.State, passed: clock.Passed) -> None:
    """Writes a checkpoint of the state's step and waits until it is complete."""
    save(checkpoints, state, passed)
    with _write_errors(checkpoints):
        checkpoints.wait_until_finished()


@contextlib.contextmanager
def _write_errors(checkpoints: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # tensorstore's errors are ValueErrors
        raise WriteError(
            f"cannot write a checkpoint in {checkpoints.directory}: {error}; complete ones are "
            "kept, the same command resumes from the newest"
        ) from error


def restore(checkpoints: ocp.CheckpointManager, like: StateT) -> StateT | None:
    """Returns the latest checkpoint, with the structure and shapes of `like`, or None.

    Raises a ConfigError that names the checkpoint's folder where it cannot be read.
    """
    latest = checkpoints.latest_step()
    if latest is None:
        return None
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        restored = checkpoints.restore(latest, args=ocp.args.StandardRestore(shapes))
    except Exception as error:  # orbax raises exactly this for files that are damaged or missing
        folder = checkpoints.directory / str(latest)
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(".")
        raise errors.ConfigError(
            f"the checkpoint {folder} cannot be read: {reason}; if it is damaged, delete this "
            "folder to resume from the checkpoint before it, or to begin anew without one"
        ) from error
    return typing.cast(StateT, restored)  # of the type of `like`


def passed(checkpoints: ocp.CheckpointManager) -> clock.Passed:
    """Returns the time that the latest checkpoint's run had taken, none without a checkpoint."""
    latest = checkpoints.latest_step()
    if latest is None:
        return clock.Passed()
    kept = checkpoints.metadata(latest).custom_metadata
    if not kept:
        logger.info("checkpoint %d does not say how long its run took: minutes begin anew", latest)
        return clock.Passed()
    return clock.Passed(run=kept["run"], stage=kept["stage"])


def export_parts(state: recipe.State | recipe.Weights, stem: pathlib.Path) -> list[pathlib.Path]:
    """Writes weights and their average as STEM.0.npz, STEM.1.npz, ..., each under 16 MiB."""
    arrays = {"step": np.asarray(state.step)}
    for kind, params in (("params", state.params), ("average", state.average)):
        arrays |= {f"{kind}/{path}": np.asarray(array) for path, array in params.items()}
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in arrays.items():
        if size + array.nbytes > MAX_PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    files = [stem.with_name(f"{stem.name}.{i}.npz") for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        np.savez(file, **part)  # pyright: ignore[reportArgumentType]  # each is an array
    return files


def parts_of(stem: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that `export_parts` has written under this name."""
    return sorted(stem.parent.glob(f"{stem.name}.*.npz"))


def import_parts(stem: pathlib.Path) -> recipe.Weights:
    """Returns what files of `export_parts` hold."""
    files = parts_of(stem)
    if not files:
        raise FileNotFoundError(f"no {stem}.0.npz: give --import-state the name without .N.npz")
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        with np.load(file) as part:
            arrays |= dict(part)
    number = int(arrays.pop("step"))
    params, average = (
        {n.removeprefix(kind): jnp.asarray(a) for n, a in arrays.items() if n.startswith(kind)}
        for kind in ("params/", "average/")
    )
    return recipe.Weights(step=number, params=params, average=average)
