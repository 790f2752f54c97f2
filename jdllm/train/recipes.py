"""The recipes of training: one readable dict, no discovery."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jdllm import errors
from jdllm.train import config as config_lib
from jdllm.train import recipe, text
from jdllm.train.scenes import config as scenes_config
from jdllm.train.scenes import scene_recipe

DEFAULT = "text"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A recipe's options, and what makes it: `build(config, output_dir)`."""

    config: type[config_lib.RunConfig]
    build: Callable[[Any, pathlib.Path], recipe.Recipe]


RECIPES: dict[str, Kind] = {
    "text": Kind(config=config_lib.TrainConfig, build=text.TextRecipe),
    "scenes": Kind(config=scenes_config.SceneConfig, build=scene_recipe.SceneRecipe),
}


def load(path: pathlib.Path, overrides: Sequence[str] = ()) -> config_lib.RunConfig:
    """Returns the config of a YAML file, whose key `recipe` says of which recipe it is."""
    values = config_lib.read(path, overrides)
    return config_lib.from_mapping(values, _kind(values.get("recipe", DEFAULT)).config)


def build(config: config_lib.RunConfig, output_dir: pathlib.Path) -> recipe.Recipe:
    """Returns the recipe of a run that writes to `output_dir`."""
    return _kind(config.recipe).build(config, output_dir)


def _kind(name: Any) -> Kind:
    if name not in RECIPES:
        raise errors.ConfigError(
            f"recipe={errors.quote(name)} is unknown; choose {', '.join(RECIPES)}"
        )
    return RECIPES[name]
