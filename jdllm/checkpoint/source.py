"""Finds the local directory of a model that a person names, and reads its JSON files."""

from __future__ import annotations

import importlib.resources
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jdllm import errors
from jdllm.checkpoint import hub, weight_files

CONFIG_NAME, MODEL_INDEX_NAME = hub.CONFIG_NAME, hub.MODEL_INDEX_NAME
BUNDLED_MODEL = "jdllm-nano"  # the default model
BUNDLED_MODELS = (BUNDLED_MODEL, "jdllm-nano-canvas")  # those that write text
# Those that make images, each a pipeline folder; the first is the default of `ImageEngine`.
BUNDLED_IMAGE_MODELS = ("jdllm-nano-image",)

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")

_CLASS_KEY = "_class_name"  # of the config.json of diffusers' models

CheckIndex = Callable[[dict[str, Any], pathlib.Path], None]


def bundled_model(name: str = BUNDLED_MODEL) -> pathlib.Path:
    """Returns the directory of a model that is part of the package."""
    return pathlib.Path(str(importlib.resources.files("jdllm") / "assets" / name))


def bundled_folder(name: str | os.PathLike[str]) -> pathlib.Path | None:
    """Returns the directory of the bundled model of this name, None if there is none."""
    is_bundled = str(name) in (*BUNDLED_MODELS, *BUNDLED_IMAGE_MODELS)
    # A local directory has priority over a bundled model of the same name.
    return bundled_model(str(name)) if is_bundled and not pathlib.Path(name).is_dir() else None


def resolve(
    model_path: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    variant: str | None = None,
    check_index: CheckIndex | None = None,
) -> pathlib.Path:
    """Returns the directory of a model: `model_path` is a path, a bundled name or a hub id.

    None means jdllm-nano. A local directory has priority over a bundled model of the same name.
    Of a hub id only what is read is downloaded, weights of `variant` where a component of a
    pipeline has them; `check_index(index, directory)` may refuse a pipeline before its weights are.
    """
    directory = pathlib.Path(bundled_model() if model_path is None else model_path).expanduser()
    if model_path is not None:
        directory = bundled_folder(model_path) or directory
    if directory.is_file():
        _refuse_file(directory)
    if not directory.is_dir():
        cache_dir = None if download_dir is None else pathlib.Path(download_dir)
        place = hub.Repository(repo_id=str(model_path), revision=revision, cache_dir=cache_dir)
        return _download(place, variant, check_index)
    _check(directory, weight_files.names_in(directory))
    return directory


def resolve_text(
    model_path: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
    """Returns the directory of a model that writes text; see `resolve`.

    An image pipeline is a ConfigError, of a hub id before its weights are downloaded.
    """
    directory = resolve(
        model_path, revision=revision, download_dir=download_dir, check_index=_refuse_pipeline
    )
    if is_pipeline(directory):
        _refuse_pipeline({}, directory)
    return directory


def is_pipeline(directory: pathlib.Path) -> bool:
    """Returns whether a model directory is an image pipeline, with a folder per component."""
    return (directory / MODEL_INDEX_NAME).is_file()


def _refuse_pipeline(_: dict[str, Any], directory: pathlib.Path) -> NoReturn:
    raise errors.ConfigError(
        f"{directory} is an image pipeline; use jdllm.ImageEngine, or jdllm serve"
    )


def _component_of(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of the pipeline that a folder is a component of, None if there is none."""
    place = pathlib.Path(os.path.abspath(directory))  # noqa: PTH100  # it follows no links
    if not is_pipeline(place.parent):
        return None
    return place.parent if place.name in read_json(place.parent / MODEL_INDEX_NAME) else None


def _refuse_file(path: pathlib.Path) -> NoReturn:
    folder = path.parent
    if (pipeline := _component_of(folder)) is not None:
        folder = pipeline
    if (folder / CONFIG_NAME).is_file() or is_pipeline(folder):
        hint = f"; give the folder {folder}"
    else:
        hint = weight_files.advice([path.name], None)
    raise errors.ConfigError(f"{path} is a file, and a model is a folder{hint}")


def _check(directory: pathlib.Path, names: Sequence[str]) -> None:
    """Raises unless a folder is a model's; `names` are those of the files that a model has there.

    A component of a pipeline is none.
    """
    if is_pipeline(directory):
        return
    if (pipeline := _component_of(directory)) is not None:
        raise errors.ConfigError(
            f"{directory} is one component of the image pipeline {pipeline}; give that folder"
        )
    if not (directory / CONFIG_NAME).is_file():
        raise errors.ConfigError(
            f"{directory} is no model directory: it holds no {CONFIG_NAME} and no "
            f"{MODEL_INDEX_NAME}{weight_files.advice(names, None)}"
        )
    class_name = read_json(directory / CONFIG_NAME).get(_CLASS_KEY)
    if class_name is not None:
        raise errors.ConfigError(
            f"{directory} is one component of an image pipeline ({errors.quote(class_name)}); give "
            f"a folder with all components and {MODEL_INDEX_NAME}"
        )


def _download(
    place: hub.Repository, variant: str | None, check_index: CheckIndex | None
) -> pathlib.Path:
    try:
        path = place.fetch([MODEL_INDEX_NAME, CONFIG_NAME])
        if is_pipeline(path):
            index = read_json(path / MODEL_INDEX_NAME)
            if check_index is not None:
                check_index(index, path)
            return hub.fetch_components(place, index, variant)
        if not (path / CONFIG_NAME).is_file():
            _check(path, place.names().get(".", []))
        _check(path, [])
        return place.fetch(_PATTERNS)
    except errors.ConfigError:
        raise
    except (OSError, ValueError) as error:
        # HFValidationError is a ValueError, hub and connection errors are OSErrors.
        reason = str(error).strip().splitlines()[0]
        raise errors.ConfigError(
            f"{place.repo_id!r} is neither a directory on this machine nor a Hugging Face model "
            f"that could be loaded ({type(error).__name__}: {reason})"
        ) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise errors.ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise errors.ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise errors.ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.ConfigError(f"{path} holds no JSON object")
    return value


def read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty object if there is no file."""
    return read_json(path) if path.is_file() else {}
