"""Rules that bound how many images share a launch: the file of `--batching-config`, as in SGLang.

    {"schema_version": 1, "rules": [{"model_contains": "Z-Image", "resolution": "1024x1024",
                                     "device_memory_gb_max": 48, "max_batch_size": 2}]}

Of all rules that match a size, the smallest bounds count. Sizes are in pixels, memory in GiB.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jdllm import errors

_ANY_SIZE = "*"
_SIZE = re.compile(r"[1-9]\d{0,5}x[1-9]\d{0,5}", re.ASCII)
_NOTES = "calibration"  # where a cap comes from: a note for people
_FILE_KEYS = ("rules", "schema_version")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRule:
    """Bounds the images of a launch, for models and sizes that it matches.

    `model` is the whole `model_path`, `model_contains` a part of it; `resolution` is WIDTHxHEIGHT
    or `*`. A rule for a server that offloads the transformer never matches: here it never waits in
    the host's memory. `max_cost` bounds the tokens that the transformer computes for all images of
    a launch.
    """

    model: str | None = None
    model_contains: str | None = None
    resolution: str = _ANY_SIZE
    device_memory_gb_min: float | None = None
    device_memory_gb_max: float | None = None
    offload: bool = False
    max_batch_size: int
    max_cost: float | None = None

    def matches(self, *, model: str, width: int, height: int, memory_gb: float | None) -> bool:
        """Returns whether it bounds launches of images of this size; unknown memory matches."""
        low, high = self.device_memory_gb_min, self.device_memory_gb_max
        return (
            self.model in (None, model)
            and (self.model_contains is None or self.model_contains in model)
            and self.resolution in (_ANY_SIZE, f"{width}x{height}")
            and not self.offload
            and (memory_gb is None or low is None or memory_gb >= low)
            and (memory_gb is None or high is None or memory_gb <= high)
        )

    def most(self, tokens: int) -> int:
        """Returns how many images of so many tokens a launch may have; at least 1."""
        if self.max_cost is None:
            return self.max_batch_size
        return max(1, min(self.max_batch_size, int(self.max_cost // tokens)))


def parse(source: str | Mapping[str, Any]) -> tuple[BatchingRule, ...]:
    """Returns the rules of a JSON file, or of the object that such a file holds.

    Raises a ConfigError that names the rule and its key.
    """
    content: Any = _read(source) if isinstance(source, str) else source
    if isinstance(content, Mapping):
        for key in content:
            if key not in _FILE_KEYS:
                _refuse(f"unknown key {errors.quote(key)}{errors.nearest(key, _FILE_KEYS)}")
        if content.get("schema_version", 1) != 1:
            _refuse(f"schema_version={errors.quote(content['schema_version'])} must be 1")
        content = content.get("rules")
    if not isinstance(content, list) or not content:
        _refuse('it must hold {"schema_version": 1, "rules": [...]} with one rule or more')
    return tuple(_rule(values, f"rules[{place}]") for place, values in enumerate(content))


def most_images(
    rules: Sequence[BatchingRule],
    *,
    model: str,
    width: int,
    height: int,
    tokens: int,
    memory_gb: float | None,
) -> int | None:
    """Returns the smallest bound of all rules that match; None if none does.

    An image of this size has so many `tokens` in the transformer.
    """
    bounds = [
        rule.most(tokens)
        for rule in rules
        if rule.matches(model=model, width=width, height=height, memory_gb=memory_gb)
    ]
    return min(bounds, default=None)


def _read(path: str) -> Any:
    try:
        return json.loads(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(f"{path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        _refuse(f"{path} is not valid JSON: {error}")


def _rule(values: Any, place: str) -> BatchingRule:
    if not isinstance(values, Mapping):
        _refuse(f"{place} must be an object, not {errors.quote(values)}")
    known = {field.name for field in dataclasses.fields(BatchingRule)}
    given = {key: value for key, value in values.items() if value is not None and key != _NOTES}
    for key in given:
        if key not in known:
            hint = errors.nearest(key, {*known, _NOTES})
            _refuse(f"{place}: unknown key {errors.quote(key)}{hint}")
    for key in ("model", "model_contains", "resolution"):
        if key in given and not isinstance(given[key], str):
            _refuse(f"{place}: {key}={errors.quote(given[key])} must be a text")
    size = given.get("resolution", _ANY_SIZE)
    if size != _ANY_SIZE and not _SIZE.fullmatch(size):
        _refuse(f"{place}: resolution={errors.quote(size)} must be WIDTHxHEIGHT or *")
    if not isinstance(given.get("offload", False), bool):
        _refuse(f"{place}: offload={errors.quote(given['offload'])} must be true or false")
    if "max_batch_size" not in given:
        _refuse(f"{place}: max_batch_size is missing")
    if ("model" in given) == ("model_contains" in given):
        _refuse(f"{place}: give either model or model_contains")
    _check_number(given, "max_batch_size", place, kinds=(int,), low=1)
    for key in ("max_cost", "device_memory_gb_min", "device_memory_gb_max"):
        _check_number(given, key, place, kinds=(int, float), low=0)
    rule = BatchingRule(**given)
    low, high = rule.device_memory_gb_min, rule.device_memory_gb_max
    if low is not None and high is not None and low > high:
        _refuse(f"{place}: device_memory_gb_min={low} is above device_memory_gb_max={high}")
    return rule


def _check_number(
    given: Mapping[str, Any], key: str, place: str, *, kinds: tuple[type, ...], low: int
) -> None:
    value = given.get(key, low + 1)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value < float("inf"):
        what = "an integer" if kinds == (int,) else "a number"
        _refuse(f"{place}: {key}={errors.quote(value)} must be {what}, {low} or more")


def _refuse(message: str) -> NoReturn:
    raise errors.ConfigError(f"batching_config: {message}")
