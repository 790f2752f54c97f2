"""Downloads what is read of a model on the hub, and says what lies there if that is not it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import huggingface_hub

from jdllm import errors
from jdllm.checkpoint import weight_files

CONFIG_NAME = "config.json"
MODEL_INDEX_NAME = "model_index.json"  # of a pipeline folder, which has a folder per component

# Of each component of a pipeline, beside its weights; the whole model in one file stays there.
_BESIDE = ("*.json", "*.txt", "*.jinja")
_OF_VARIANTS = "*-of-*.*.safetensors"  # shards that the patterns of others match, too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository of the hub; `cache_dir` None is the hub's own."""

    repo_id: str
    revision: str | None
    cache_dir: pathlib.Path | None

    def fetch(self, patterns: Iterable[str], ignored: Iterable[str] = ()) -> pathlib.Path:
        """Returns the folder of the repository, in which the files of these patterns are then."""
        path = huggingface_hub.snapshot_download(
            self.repo_id,
            revision=self.revision,
            cache_dir=self.cache_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )
        return pathlib.Path(path)

    def names(self) -> dict[str, list[str]]:
        """Returns the names of all files by folder ("." for the top), none without an answer."""
        try:
            paths = huggingface_hub.list_repo_files(self.repo_id, revision=self.revision)
        except Exception:  # a message says less without them, and nothing else needs them
            return {}
        found: dict[str, list[str]] = {}
        for path in map(pathlib.PurePosixPath, sorted(paths)):
            found.setdefault(str(path.parent), []).append(path.name)
        return found


def fetch_components(
    repository: Repository, index: Mapping[str, Any], variant: str | None
) -> pathlib.Path:
    """Returns the folder of a pipeline after the files of its components have come.

    Components without the variant come without one. Raises a ConfigError, before the weights of
    other components come, if none has the variant, and if those of one are of another kind.
    """
    libraries = {
        name: value[0]
        for name, value in index.items()
        if isinstance(value, list) and value and isinstance(value[0], str)
    }
    beside = [f"{name}/{pattern}" for name in libraries for pattern in _BESIDE]
    ignored = [_OF_VARIANTS] if variant is None else []
    patterns = [MODEL_INDEX_NAME, *beside, *_weights(libraries, variant)]
    path = repository.fetch(patterns, ignored)
    bases = {
        name: weight_files.BASE_NAMES[library]
        for name, library in libraries.items()
        if library in weight_files.BASE_NAMES and (path / name / CONFIG_NAME).is_file()
    }
    lacking = _lacking(path, bases, variant)
    if variant is not None and lacking:
        if lacking == bases:
            names = repository.names()
            found = {
                name: weight_files.variants(names.get(name, []), base)
                for name, base in bases.items()
            }
            raise errors.ConfigError(
                f"{repository.repo_id}: {weight_files.without(variant, found)}"
            )
        path = repository.fetch(_weights(lacking, None), [_OF_VARIANTS])
        lacking = _lacking(path, lacking, None)
    _explain(repository, lacking)
    return path


def _weights(names: Iterable[str], variant: str | None) -> list[str]:
    bases = weight_files.BASE_NAMES.values()
    patterns = [one for base in bases for one in weight_files.patterns(base, variant)]
    return [f"{name}/{pattern}" for name in names for pattern in patterns]


def _lacking(path: pathlib.Path, bases: Mapping[str, str], variant: str | None) -> dict[str, str]:
    """Returns the components, with their base names, that have no weights of a variant."""
    return {
        name: base
        for name, base in bases.items()
        if not weight_files.chosen(weight_files.names_in(path / name), base, variant)
    }


def _explain(repository: Repository, lacking: Mapping[str, str]) -> None:
    """Raises if the hub has other files in place of the weights that are lacking."""
    names = repository.names() if lacking else {}
    found = {name: weight_files.advice(names.get(name, []), base) for name, base in lacking.items()}
    faults = [f"{name} has no weights that are read{text}" for name, text in found.items() if text]
    if faults:
        raise errors.ConfigError("\n  ".join([f"{repository.repo_id} on the hub:", *faults]))
