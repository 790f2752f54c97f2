"""Finds the local directory of a model that a person names, and reads its JSON files."""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

import huggingface_hub

from jdllm import errors

CONFIG_NAME = "config.json"
MODEL_INDEX_NAME = "model_index.json"  # of a pipeline folder, which has a folder per component
BUNDLED_MODEL = "jdllm-nano"  # the default model
BUNDLED_MODELS = (BUNDLED_MODEL, "jdllm-nano-canvas")  # those that write text
# Those that make images, each a pipeline folder; the first is the default of `ImageEngine`.
BUNDLED_IMAGE_MODELS = ("jdllm-nano-image",)

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Of each component of a pipeline; the whole model in one file and other precisions stay there.
_COMPONENT_PATTERNS = (
    "*.json", "*.txt", "*.jinja", "model*.safetensors", "diffusion_pytorch_model*.safetensors",
)  # fmt: skip
_VARIANTS = ("*.fp16*", "*.bf16*", "*.non_ema*", "*.ema*")

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
    check_index: CheckIndex | None = None,
) -> pathlib.Path:
    """Returns the directory of a model: `model_path` is a path, a bundled name or a hub id.

    None means jdllm-nano. A local directory has priority over a bundled model of the same name.
    Of a hub id only what is read is downloaded; `check_index(index, directory)` may refuse an
    image pipeline before its weights are.
    """
    directory = pathlib.Path(bundled_model() if model_path is None else model_path).expanduser()
    if model_path is not None:
        directory = bundled_folder(model_path) or directory
    if not directory.is_dir():
        directory = _download(str(model_path), revision, download_dir, check_index)
    if not (directory / CONFIG_NAME).is_file() and not is_pipeline(directory):
        raise errors.ConfigError(
            f"{directory} is no model directory: it holds no {CONFIG_NAME} and no "
            f"{MODEL_INDEX_NAME}"
        )
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


def _download(
    repo_id: str,
    revision: str | None,
    download_dir: str | os.PathLike[str] | None,
    check_index: CheckIndex | None,
) -> pathlib.Path:
    download = functools.partial(
        huggingface_hub.snapshot_download,
        repo_id,
        revision=revision,
        cache_dir=None if download_dir is None else pathlib.Path(download_dir),
    )
    try:
        path = pathlib.Path(download(allow_patterns=[MODEL_INDEX_NAME, CONFIG_NAME]))
        if is_pipeline(path):
            index = read_json(path / MODEL_INDEX_NAME)
            if check_index is not None:
                check_index(index, path)
            patterns = _of_pipeline(index)
            path = download(allow_patterns=patterns, ignore_patterns=list[str](_VARIANTS))
        else:
            path = download(allow_patterns=list[str](_PATTERNS))
    except errors.ConfigError:
        raise
    except (OSError, ValueError) as error:
        # HFValidationError is a ValueError, hub and connection errors are OSErrors.
        reason = str(error).strip().splitlines()[0]
        raise errors.ConfigError(
            f"{repo_id!r} is neither a directory on this machine nor a Hugging Face model that "
            f"could be loaded ({type(error).__name__}: {reason})"
        ) from error
    return pathlib.Path(path)


def _of_pipeline(index: dict[str, Any]) -> list[str]:
    """Returns patterns of the files that the components of an index need."""
    names = [name for name, value in index.items() if isinstance(value, list) and any(value)]
    parts = [f"{name}/{pattern}" for name in names for pattern in _COMPONENT_PATTERNS]
    return [MODEL_INDEX_NAME, *parts]


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
