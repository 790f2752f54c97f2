"""The settings of a run beside its checkpoints, so that what is resumed is one run.

A run whose learning rate, batches or model change on the way is a mixture that nobody asked for
and that no curve shows. So the output folder keeps them, in `run.json`: those of its checkpoints,
written with the first one of a run or of a change.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.host import files
from jdllm.train.config import RunConfig

logger = logging.getLogger(__name__)

FILE = "run.json"
IMPORT_STATE = "import_state"
# By these the learning rate falls to 0, sooner or later than it would have: time is not planned.
MINUTES = frozenset({"max_minutes", "vae_minutes"})
# What is measured, written and prepared ahead, and how often: every step is the one that it was.
MAY_CHANGE = frozenset(
    {
        "log_every",
        "checkpoint_every",
        "eval_every",
        "eval_problems",
        "eval_thresholds",
        "eval_steps",
        "eval_guidance",
        "dp_size",
        "data_threads",
        "data_workers",
        "prefetch_batches",
    }
)

Settings = Mapping[str, Any]


def of(config: RunConfig, import_state: pathlib.Path | None) -> Settings:
    """Returns what `run.json` keeps, as JSON gives it back: all options, and the first weights."""
    given = None if import_state is None else str(import_state)
    return json.loads(json.dumps({**dataclasses.asdict(config), IMPORT_STATE: given}))


def resumed(folder: pathlib.Path, config: RunConfig, new: Settings) -> Settings:
    """Returns the settings with which the run whose checkpoints `folder` holds goes on.

    `new` are those of the config, as `of` returns them.

    Raises a ConfigError for settings that would make it another run. Changes that are allowed are
    logged; so is a run of which nothing is known, because it is older than `run.json`.
    """
    file = folder / FILE
    if not file.exists():
        logger.info("%s does not exist: settings are not compared with those of the run", file)
        return new
    # An option that is newer than the run had its default.
    old = _defaults(config) | _read(file)
    if new[IMPORT_STATE] is None:  # a checkpoint has the weights; they still began with these
        new = {**new, IMPORT_STATE: old.get(IMPORT_STATE)}
    # Recipes have different options: one that is another is said once.
    names = ["recipe"] if old["recipe"] != new["recipe"] else sorted(old.keys() | new.keys())
    changed = [name for name in names if old.get(name) != new.get(name)]
    refused = [name for name in changed if not _may_change(name, old.get(name), new.get(name))]
    if refused:
        raise errors.ConfigError(
            f"{folder} holds a run with other settings: {_shown(refused, old, new)}; resume it "
            "with its own, or give another --output-dir"
        )
    if changed:
        logger.info("the run goes on with other settings: %s", _shown(changed, old, new))
    return new


def write(folder: pathlib.Path, settings: Settings) -> None:
    """Keeps the settings in `folder`; raises an OSError where it cannot."""
    files.replace_text(folder / FILE, json.dumps(settings, indent=2) + "\n")


def _defaults(config: RunConfig) -> dict[str, Any]:
    fields = dataclasses.fields(config)
    given = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    return json.loads(json.dumps(given))


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(settings, dict):
        raise _damaged(file, "it is no JSON object")
    return settings


def _damaged(file: pathlib.Path, reason: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"{file} is damaged: {reason}; delete it to resume without comparing settings"
    )


def _may_change(name: str, old: Any, new: Any) -> bool:
    if name == "num_steps":  # the rate falls later; it cannot fall earlier than it did
        return isinstance(old, int) and new > old
    return name in MINUTES | MAY_CHANGE


def _shown(names: list[str], old: Settings, new: Settings) -> str:
    return "; ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names)
