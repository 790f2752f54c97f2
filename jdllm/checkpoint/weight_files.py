"""Which files are weights, by the names that diffusers and transformers give them.

    {base}.safetensors                         the weights in one file
    {base}-00001-of-00002.safetensors          or in shards,
    {base}.safetensors.index.json              whose tensors an index names
    {base}.fp16.safetensors                    the same of a variant, here fp16
    {base}.fp16-00001-of-00002.safetensors
    {base}.safetensors.index.fp16.json

Older versions wrote `{base}-00001-of-00002.fp16.safetensors` and
`{base}.safetensors.fp16.index.json`. Functions see names alone, which may be those of a hub.
"""

from __future__ import annotations

import glob
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

# The libraries that write models, and what each calls the weights of one.
BASE_NAMES = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}

_SUFFIX = ".safetensors"
_SHARD = r"-\d+-of-\d+"
_INDEX = re.compile(r".+\.safetensors(\.[^.]+)?\.index(\.[^.]+)?\.json")
_QUANTISED = ".gguf"
# The files of other formats that hold weights.
_FOREIGN = frozenset({".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", _QUANTISED})
_MOST_NAMED = 3


def names_in(directory: pathlib.Path) -> list[str]:
    """Returns the names in a folder, none if there is no such folder."""
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def chosen(names: Iterable[str], base_name: str, variant: str | None = None) -> list[str]:
    """Returns the files with the weights of a variant (None: of no variant), whole or in shards."""
    found = sorted(name for name in names if _variant(name, base_name) == (variant or ""))
    whole = f"{base_name}{f'.{variant}' if variant else ''}{_SUFFIX}"
    return [whole] if whole in found else found


def variants(names: Iterable[str], base_name: str) -> list[str]:
    """Returns the variants of which there are weights."""
    found = {_variant(name, base_name) for name in names}
    return sorted(variant for variant in found if variant)


def variants_in(directory: pathlib.Path, base_name: str) -> list[str]:
    """Returns the variants of which a folder has weights."""
    return variants(names_in(directory), base_name)


def indexes(base_name: str, variant: str | None = None) -> tuple[str, ...]:
    """Returns the names that the index of shards may have."""
    begin = f"{base_name}{_SUFFIX}"
    if variant is None:
        return (f"{begin}.index.json",)
    return f"{begin}.index.{variant}.json", f"{begin}.{variant}.index.json"


def is_index(name: str) -> bool:
    """Returns whether a file is the index of shards, of a variant or not."""
    return _INDEX.fullmatch(name) is not None


def patterns(base_name: str, variant: str | None = None) -> list[str]:
    """Returns patterns of file names: all that `chosen` finds, and maybe shards of variants."""
    if variant is None:
        return [f"{base_name}{_SUFFIX}", f"{base_name}-*-of-*{_SUFFIX}"]
    part = glob.escape(variant)
    return [
        f"{base_name}.{part}{_SUFFIX}",
        f"{base_name}.{part}-*-of-*{_SUFFIX}",
        f"{base_name}-*-of-*.{part}{_SUFFIX}",
    ]


def advice(names: Sequence[str], base_name: str | None) -> str:
    """Returns what lies in a folder without its weights, and what to do; "" if nothing does.

    It begins with a semicolon. Without a `base_name` there are no variants.
    """
    parts = [] if base_name is None else _of_variants(variants(names, base_name))
    quantised = [name for name in names if name.endswith(_QUANTISED)]
    if quantised:
        parts.append(f"{_listed(quantised)}: quantised weights are not read; use the safetensors")
    foreign = [name for name in names if pathlib.PurePath(name).suffix in _FOREIGN]
    foreign = [name for name in foreign if name not in quantised]
    if foreign:
        parts.append(
            f"{_listed(foreign)}: only safetensors are read; load the model with the library that "
            "wrote it, and write it with save_pretrained"
        )
    other = [name for name in names if name.endswith(_SUFFIX) and not _is_named(name, base_name)]
    if other:
        parts.append(
            f"{_listed(other)}: weights of another name or layout are not read; diffusers writes a "
            "folder from the one file of a pipeline (from_single_file, then save_pretrained)"
        )
    return "".join(f"; found {part}" for part in parts)


def without(variant: str, found: Mapping[str, Sequence[str]]) -> str:
    """Returns an error: no component has a variant; `found` are the variants of each."""
    names = sorted({one for of_component in found.values() for one in of_component})
    there = [
        f"{name} ({', '.join(where for where, of_it in found.items() if name in of_it)})"
        for name in names
    ]
    rest = f"there are {', '.join(there)}" if there else "there is none; leave it out"
    return f"variant={variant!r}: no component has weights of this variant; {rest}"


def _variant(name: str, base_name: str) -> str | None:
    """Returns the variant that a file has weights of, "" for none; None for another file."""
    pattern = rf"{re.escape(base_name)}({_SHARD})?(\.([^.]+?)({_SHARD})?)?{re.escape(_SUFFIX)}"
    match = re.fullmatch(pattern, name)
    return None if match is None else match[3] or ""


def _is_named(name: str, base_name: str | None) -> bool:
    return base_name is not None and _variant(name, base_name) is not None


def _of_variants(found: Sequence[str]) -> list[str]:
    if not found:
        return []
    flags = " or ".join(f"--variant {one}" for one in found)
    return [f"weights of a variant, {_listed(found)}: add {flags} (offline: variant={found[0]!r})"]


def _listed(names: Sequence[str]) -> str:
    rest = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *rest])
