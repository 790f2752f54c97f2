"""The rule for fields of other servers: what asks for nothing passes, all else is refused by name.

Clients, routers and SDKs send whole records of fields, most of them unset. A list of the names
that happen to be sent would never be complete, so the value decides:

- `null` asks for nothing, under any name.
- `""`, `[]`, `{}` and `false` ask for nothing, under any name (of fields that are served,
  `request_model` says which mean them), with one exception: `false` switches something off where
  the default is `true`. Fields of that kind are listed (`ON_BY_DEFAULT`, and a
  table that gives `True` as a default), and under an unknown name that looks like one of them,
  `false` is refused: `skip_special_token: false` is a misspelt request, not an empty one.
- A number asks for something, `0` included: it is an instruction for most fields (`temperature`,
  `seed`, `max_tokens`, `logprobs`), so `temprature: 0` must not pass. It passes only for a known
  field that lists it as a default (`min_tokens: 0`).
- Any other value passes only if a known field lists it as its documented default.

Everything else is an error that names the field and says what is served instead, if anything is
(`names`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jdllm import errors
from jdllm.foreign import names as foreign_names
from jdllm.foreign.names import Places

# name -> values, besides the empty ones, that ask for nothing: the documented defaults
Defaults = Mapping[str, Collection[Any]]

ON_BY_DEFAULT = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "early_stop",
        "embed_image_metadata",
        "escape_special_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
# More unknown names than any client sends. Each of them may be compared with all known names.
MAX_UNKNOWN = 100


def check(
    extra: Mapping[str, Any],
    defaults: Defaults,
    known: Iterable[str],
    labels: Mapping[str, type] | None = None,
    places: Places | None = None,
) -> None:
    """Raises a `RequestError` for the first field of `extra` that asks for something.

    `known` are the names of the fields that are served, `defaults` those that are not. `labels`
    change no output, so they pass with any value of their type. `places` are for the hint.
    """
    labels = labels or {}
    known = {*known}
    names = known.union(defaults, labels)
    unknown = 0
    for name, value in extra.items():
        if value is None:
            continue
        if name in labels:
            if type(value) is not labels[name] and not is_empty(value):
                wanted = labels[name].__name__
                raise errors.RequestError(
                    f"{name} must be a {wanted}, got {errors.quote(value)}", param=name
                )
        elif name in defaults:
            if not _is_default(value, defaults[name]):
                raise errors.RequestError(
                    f"{name}={errors.quote(value)} is not supported by this engine; "
                    f"{foreign_names.instead(name, known, places)}",
                    param=name,
                )
        else:
            unknown += 1
            if unknown > MAX_UNKNOWN:
                raise errors.RequestError(
                    f"more than {MAX_UNKNOWN} unknown parameters, such as {errors.quote(name)}; "
                    "leave them out",
                    param=name,
                )
            if not _asks_nothing(name, value, names):
                hint = foreign_names.hint(name, {*known, *labels}, places)
                raise errors.RequestError(
                    f"unknown parameter {errors.quote(name)}{hint}", param=name
                )


def is_empty(value: Any) -> bool:
    """Says whether `value` is one of `""`, `[]`, `{}` and false."""
    return value is False or (isinstance(value, str | list | tuple | dict) and not value)


def _asks_nothing(name: str, value: Any, known: Collection[str]) -> bool:
    """Says whether `value` is empty, and does not switch off what is on by default.

    `known` are the names of which `name` may be a misspelling.
    """
    switches_off = value is False and name in ON_BY_DEFAULT
    return is_empty(value) and not switches_off and not _misspelt(name, value, known)


def _is_default(value: Any, defaults: Collection[Any]) -> bool:
    if value is False and any(default is True for default in defaults):
        return any(default is False for default in defaults)
    if isinstance(value, dict):  # what is empty inside of it asks for nothing there, either
        value = {key: one for key, one in value.items() if one is not None and not is_empty(one)}
    return is_empty(value) or any(_same(value, default) for default in defaults)


def _same(value: Any, default: Any) -> bool:
    """Says whether two values of JSON are equal; 1 and 1.0 are, 1 and true are not."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _misspelt(name: str, value: Any, names: Collection[str]) -> bool:
    """Says whether `name` looks like a known field that `value` would switch off."""
    if value is not False or len(name) > errors.NAME_CHARACTERS:
        return False
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return bool(near) and near[0] in ON_BY_DEFAULT
