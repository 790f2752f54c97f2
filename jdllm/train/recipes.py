"""The recipes of training: one readable dict, no discovery."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jdllm import errors
from jdllm.train import recipe, text
from jdllm.train.config import RunConfig, TrainConfig, from_mapping, read
from jdllm.train.scenes import scene_recipe
from jdllm.train.scenes.config import SceneConfig

DEFAULT = "text"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A recipe's options, and what makes it: `build(config, output_dir)`."""

    config: type[RunConfig]
    build: Callable[[Any, pathlib.Path], recipe.Recipe]


RECIPES: dict[str, Kind] = {
    "text": Kind(config=TrainConfig, build=text.TextRecipe),
    "scenes": Kind(config=SceneConfig, build=scene_recipe.SceneRecipe),
}


def load(path: pathlib.Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the config of a YAML file, whose key `recipe` says of which recipe it is."""
    values = read(path, overrides)
    return from_mapping(values, _kind(values.get("recipe", DEFAULT)).config)


def build(config: RunConfig, output_dir: pathlib.Path) -> recipe.Recipe:
    """Returns the recipe of a run that writes to `output_dir`."""
    return _kind(config.recipe).build(config, output_dir)


def _kind(name: Any) -> Kind:
    if name not in RECIPES:
        raise errors.ConfigError(
            f"recipe={errors.quote(name)} is unknown; choose {', '.join(RECIPES)}"
        )
    return RECIPES[name]
