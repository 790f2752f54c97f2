"""Weight tables: which checkpoint tensor fills which part of which parameter.

A table is data. Each row gives the view of the parameter that a tensor fills, so one table serves
both loading (`view[...] = tensor`) and export. `match` compares a whole checkpoint with the table
and reports every difference in one error.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from jdllm import errors

MAX_LISTED = 20

# Parts of the names of tensors that no forward pass reads: training heads, recomputed buffers.
_SKIPPED_PARTS = frozenset({"v_head", "inv_freq"})
# Multimodal checkpoints nest the language model. (prefix in the file, prefix in the table)
_PREFIXES = (("model.language_model.", "model."), ("model.lm_head.", "lm_head."))
# A checkpoint of the decoder without its LM head lacks this prefix, and so do a few with the head.
_DECODER = "model."


def whole(array: np.ndarray) -> np.ndarray:
    """Returns the whole parameter, for parameters with the layout of the checkpoint."""
    return array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One checkpoint tensor: its HF name and shape, the parameter's path, and the part it fills.

    Rows of one parameter with different `form`s are alternatives (split or merged experts); a
    checkpoint holds exactly one form. `cut` is the part of the tensor that is used, so a row with
    it cannot be exported. `other_names`: what other files call the tensor.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    view: Callable[[np.ndarray], np.ndarray] = whole
    form: str = ""
    cut: Callable[[np.ndarray], np.ndarray] | None = None
    other_names: tuple[str, ...] = ()

    def read(self, array: np.ndarray) -> np.ndarray:
        """Returns this row's part of the full parameter, in the shape of the checkpoint."""
        if self.cut is not None:
            raise ValueError(f"{self.name} holds more than the parameter {self.target}")
        return self.view(array).reshape(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether a tensor has this shape; a convolution of size 1 is a product."""
        is_matrix = len(self.shape) == 2
        return tuple(shape) == self.shape or (is_matrix and tuple(shape) == (*self.shape, 1, 1))

    def write(self, array: np.ndarray, tensor: np.ndarray) -> None:
        """Fills this row's part of the parameter and casts to the parameter's dtype."""
        part = self.view(array)
        assert np.may_share_memory(part, array), f"{self.name} does not view its parameter"
        used = tensor if self.cut is None else self.cut(tensor)
        part[...] = used.reshape(part.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """A matched row, and the name of its tensor in the checkpoint."""

    tensor: str
    row: WeightRow


def match(
    rows: Iterable[WeightRow],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional_prefix: str = "",
    is_unused: Callable[[str], bool] | None = None,
    unread_dtypes: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, list[Fill]]:
    """Returns, per parameter, the tensors that fill it completely.

    `shapes` (name -> shape) describes the checkpoint, and `unread_dtypes` (name -> dtype) those of
    its tensors that cannot be read. If it does not fit, one `ConfigError` lists all its missing,
    unexpected, doubly matched and wrongly shaped tensors, and what is needed and cannot be read.
    Names of the checkpoint may start with `optional_prefix`; it is stripped before they are matched
    or passed to `is_unused`. A tensor that `is_unused` may be there or not, of any dtype. Names may
    lack the prefix "model.".
    """
    rows = tuple(rows)
    by_target: dict[str, dict[str, list[WeightRow]]] = {}
    for row in rows:
        by_target.setdefault(row.target, {}).setdefault(row.form, []).append(row)
    known = {row.name for forms in by_target.values() for form in forms.values() for row in form}
    is_unused = is_unused or _none_unused
    sources, doubled = _sources(shapes, optional_prefix, is_unused, known)
    _rename(sources, rows)
    sources = {name: raw for name, raw in sources.items() if not is_unused(name)}
    fills: dict[str, list[Fill]] = {}
    missing, wrong, unread = [], [], []
    used: set[str] = set()
    for target, forms in by_target.items():
        present = [form for form in forms.values() if any(row.name in sources for row in form)]
        used.update(row.name for form in forms.values() for row in form)
        if len(present) > 1:
            doubled.append(f"{target} by {' and '.join(form[0].name for form in present)}")
        chosen = present[0] if present else next(iter(forms.values()))
        missing += [row.name for row in chosen if row.name not in sources]
        chosen = [row for row in chosen if row.name in sources]
        fills[target] = [Fill(sources[row.name], row) for row in chosen]
        for raw, row in ((fill.tensor, fill.row) for fill in fills[target]):
            if raw in unread_dtypes:
                unread.append(f"{raw} is {unread_dtypes[raw]}")
            elif not row.fits(shapes[raw]):
                wrong.append(f"{raw} is {list(shapes[raw])}, expected {list(row.shape)}")
    unexpected = [raw for name, raw in sources.items() if name not in used]
    _report(missing=missing, unexpected=unexpected, doubled=doubled, wrong=wrong, unread=unread)
    return fills


def _none_unused(_: str) -> bool:
    return False


def _sources(
    shapes: Mapping[str, tuple[int, ...]],
    optional_prefix: str,
    is_unused: Callable[[str], bool],
    known: Set[str],
) -> tuple[dict[str, str], list[str]]:
    sources: dict[str, str] = {}
    doubled = []
    for raw in shapes:
        if _SKIPPED_PARTS.intersection(raw.split(".")):
            continue
        name = raw
        for prefix, plain in _PREFIXES:
            if raw.startswith(prefix):
                name = plain + raw.removeprefix(prefix)
        name = name.removeprefix(optional_prefix)
        if name not in known and _DECODER + name in known:
            name = _DECODER + name
        if name in sources and not is_unused(name):
            doubled.append(f"{name} by {sources[name]} and {raw}")
        sources[name] = raw
    return sources, doubled


def _rename(sources: dict[str, str], rows: Sequence[WeightRow]) -> None:
    """Gives each tensor that has one of a row's other names the row's name, if none has that."""
    for row in rows:
        found = [name for name in row.other_names if name in sources]
        if found and row.name not in sources:
            sources[row.name] = sources.pop(found[0])


def _report(
    *,
    missing: Sequence[str],
    unexpected: Sequence[str],
    doubled: Sequence[str],
    wrong: Sequence[str],
    unread: Sequence[str],
) -> None:
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "matched twice": doubled,
        "of a wrong shape": wrong,
        "of a dtype that is not read, such as those of quantised weights (use the checkpoint in 16 "
        "or 32 bits)": unread,
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            more = [f"... and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
            lines.append(f"{len(names)} tensors {kind}:")
            lines += [f"  {name}" for name in [*sorted(names)[:MAX_LISTED], *more]]
    if lines:
        raise errors.ConfigError("\n".join(["checkpoint does not fit the model", *lines]))
