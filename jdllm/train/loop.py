"""The training run of any recipe: steps, curve, checkpoints, evaluation, export.

The loop reads metrics from the device only every `log_every` steps. So the host runs ahead, and
the accelerator never waits for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import pathlib
import shutil
import time
from collections.abc import Mapping

import orbax.checkpoint as ocp

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.host import files, progress
from jdllm.train import checkpoints, recipes, run_lock, run_settings, stop_request
from jdllm.train.config import RunConfig
from jdllm.train.recipe import Params, Recipe, State

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where a run writes, and the weights from which it starts, if any."""

    output_dir: pathlib.Path
    import_state: pathlib.Path | None = None
    export_state: pathlib.Path | None = None
    is_resumed: bool = True

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.output_dir / "checkpoints"

    @property
    def old_checkpoints(self) -> pathlib.Path:
        """Those of the run before, until the first of a run that does not resume it."""
        return self.output_dir / "checkpoints.old"

    @property
    def curve(self) -> pathlib.Path:
        return self.output_dir / "curve.jsonl"


def train(
    config: RunConfig, paths: RunPaths, stop: stop_request.StopRequest | None = None
) -> dict[str, float]:
    """Trains until the recipe says that it is over; returns the last evaluation's numbers.

    Where `stop` has been asked, it ends with a KeyboardInterrupt; then no step is lost.
    """
    began = time.monotonic()
    if paths.export_state is not None:
        _check_can_export(paths.export_state)
    stop = stop or stop_request.StopRequest()
    with run_lock.held(paths.output_dir), contextlib.ExitStack() as ends:
        try:
            return _train(config, paths, stop, began, ends)
        except concurrent.futures.BrokenExecutor as error:  # a signal may have ended its processes
            if stop.comes():
                raise KeyboardInterrupt from error
            raise


def _train(
    config: RunConfig,
    paths: RunPaths,
    stop: stop_request.StopRequest,
    began: float,
    ends: contextlib.ExitStack,
) -> dict[str, float]:
    is_new = not paths.is_resumed or checkpoints.newest(paths.checkpoints) is None
    settings = run_settings.of(config, paths.import_state)
    if not is_new:
        settings = run_settings.resumed(paths.output_dir, config, settings)
    recipe = recipes.build(config, paths.output_dir)
    ends.callback(recipe.close)
    state = _first_state(recipe, paths.import_state if is_new else None)
    if is_new:
        _set_aside(paths)
    saved = checkpoints.manager(paths.checkpoints)
    state = checkpoints.restore(saved, state) or state
    passed = checkpoints.passed(saved)
    began -= passed.run
    saver = Saver(saved, recipe, paths, settings)
    curve = Curve(paths.curve, recipe, began=began)
    number = first = int(state.step)
    logger.info("training from step %d to %d", number, config.num_steps)
    passed = dataclasses.replace(passed, run=time.monotonic() - began)
    batches = recipe.batches(state, passed)
    bar = progress.bar(total=config.num_steps, initial=number, desc="training", unit="step")
    with stop.deferred(), bar:
        while not (stop.signal or recipe.is_over(number)):
            try:
                state, metrics = recipe.step(state, next(batches))
            except RuntimeError:  # also of grain or a pool, whose processes a signal may have ended
                if not stop.comes():
                    raise
                break
            number += 1
            bar.update()
            if number % config.log_every == 0:
                numbers = {key: float(value) for key, value in metrics.items()}
                curve.write(number, numbers)
                bar.set_postfix(loss=f"{numbers['loss']:.4f}", refresh=False)
            if number % config.checkpoint_every == 0:
                saver.save(state)
            if number % config.eval_every == 0 and number < config.num_steps:
                # An evaluation takes minutes. A stop during it must not lose earlier steps.
                saver.save_now(state)
                with stop.at_once():
                    curve.write(number, recipe.evaluate(state))
        batches.close()
        if number > first or not stop.signal:  # a stop before the first step leaves all as it was
            saver.save_now(state)
    final = recipe.evaluate(state)
    curve.write(number, final)
    recipe.export(state, paths.output_dir)
    if paths.export_state is not None:
        checkpoints.export_parts(state, paths.export_state)
    saved.close()
    logger.info("stopped at step %d after %.1f min", number, (time.monotonic() - began) / 60)
    return final


def _check_can_export(stem: pathlib.Path) -> None:
    """Makes the folder of the exported weights; hours of training must not end in an error."""
    try:
        files.make_writable(stem.parent)
    except OSError as error:
        raise errors.ConfigError(f"--export-state {stem} cannot be written: {error}") from error


def _set_aside(paths: RunPaths) -> None:
    """Moves what a new run would go on with: beside later checkpoints, none is written."""
    newest, old = checkpoints.newest(paths.checkpoints), paths.old_checkpoints
    if newest is not None:
        if old.exists():
            shutil.rmtree(old)
        paths.checkpoints.rename(old)  # one step: it is whole in the one place or in the other
        logger.info(
            "--resume never: the checkpoints of a run of %d steps are in %s until the first of "
            "this run is complete", newest, old,
        )  # fmt: skip
    # Also that of a run that ended before its first checkpoint: this one does not go on with it.
    paths.curve.unlink(missing_ok=True)


def _first_state(recipe: Recipe, stem: pathlib.Path | None) -> State:
    """Returns a state at step 0, or with the weights that `stem` names."""
    if stem is None:
        return recipe.first_state()
    # Files of one's own come before a bundled model of the same name, as folders do.
    bundled = None if checkpoints.parts_of(stem) else source.bundled_folder(stem)
    folder = bundled or stem
    weights = recipe.weights_of(folder) if folder.is_dir() else checkpoints.import_parts(stem)
    _check_shapes(recipe.shapes(), weights.params, stem)
    return recipe.adopt(weights)


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], params: Params, stem: pathlib.Path
) -> None:
    wrong = [
        f"{path} is {params[path].shape if path in params else 'missing'}, not {wanted}"
        for path, wanted in shapes.items()
        if path not in params or params[path].shape != wanted
    ]
    if wrong:
        raise errors.ConfigError(
            f"{stem}: {len(wrong)} arrays do not fit the model (linear weights are [out, in]): "
            + "; ".join(wrong[:3])
        )


class Saver:
    """Writes the checkpoints of a run; with the first, the folder is this run's alone.

    Until then its settings are those of the checkpoints that are there: a mistake in an option of a
    run that goes on can be mended.
    """

    def __init__(
        self,
        saved: ocp.CheckpointManager,
        recipe: Recipe,
        paths: RunPaths,
        settings: run_settings.Settings,
    ):
        self._saved, self._recipe, self._paths, self._settings = saved, recipe, paths, settings
        self._resumed, self._is_first = saved.latest_step(), True

    def save(self, state: State) -> None:
        """Writes a checkpoint in the background, but the first one at once."""
        if self._is_first:
            self.save_now(state)
        else:
            checkpoints.save(self._saved, state, self._recipe.passed())

    def save_now(self, state: State) -> None:
        """Writes a checkpoint, where this step has none, and waits until it is complete."""
        checkpoints.save_now(self._saved, state, self._recipe.passed())
        if self._is_first and int(state.step) != self._resumed:
            self._is_first = False
            self._take_over()

    def _take_over(self) -> None:
        run_settings.write(self._paths.output_dir, self._settings)
        old = self._paths.old_checkpoints
        if old.exists():
            logger.info("deleting %s: this run has a checkpoint", old)
            shutil.rmtree(old)


class Curve:
    """A file with one JSON line per event: the step, seconds of the run, and numbers."""

    def __init__(self, path: pathlib.Path, recipe: Recipe, *, began: float):
        self.path, self.recipe, self.began = path, recipe, began
        self.last: tuple[int, float] | None = None

    def write(self, number: int, numbers: dict[str, float]) -> None:
        now = time.monotonic()
        line = {"step": number, "seconds": round(now - self.began, 1), **numbers}
        if "loss" in numbers:
            if self.last is not None:
                rate = (number - self.last[0]) / (now - self.last[1])
                line[f"{self.recipe.unit}_per_second"] = round(rate * self.recipe.batch_size, 1)
            self.last = (number, now)
        else:
            logger.info("step %d %s", number, json.dumps(numbers))
            # The next rate must not count the time of an evaluation.
            self.last = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
