"""The decoding algorithms and their options, each declared once, here.

All else that knows an option reads this table: the checks and defaults of requests
(`sampling_params`) and of the server (`config`, `engine/build/`), the help of
the command line, the tables of the documentation, and the arrays in which the options of many
rows travel to the device. `decoding/` holds one rule for each algorithm, and imports its words
and the names of its arrays from here.

An option may belong to several algorithms, which then agree on its type and its padding but
may differ in default, range and words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jdllm import errors, value_checks

BLOCK, CANVAS = "block", "canvas"  # kinds of rows
Value = float | int | bool | str
Arrays = dict[str, np.ndarray]
_DTYPES = {"number": np.float32, "integer": np.int32, "flag": np.bool_, "word": np.int32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of an algorithm.

    A number lies in [low, high], or in (low, high] with `open_low`; a word is one of `words`,
    and is its place among them on the device. A `default` of None means that the option is not
    set, which `unset` says in words. `padding` is what the array holds where a row has no
    value. `counts_positions`: larger values than the row has positions mean the same as that.
    """

    name: str
    type: Literal["number", "integer", "flag", "word"]
    default: Value | None
    help: str
    low: float = 0
    high: float = math.inf
    open_low: bool = False
    words: tuple[str, ...] = ()
    unset: str = ""
    padding: int = 0
    counts_positions: bool = False

    def check(self, value: Any) -> None:
        """Raises a `RequestError` that names the option unless it may hold `value`."""
        param = f"dllm.{self.name}"
        match self.type:
            case "number":
                value_checks.check_number(
                    value, param, low=self.low, high=self.high, open_low=self.open_low
                )
            case "integer":
                value_checks.check_integer(value, param, low=int(self.low), high=int(self.high))
            case "flag":
                value_checks.check_flag(value, param)
            case "word":
                value_checks.check_word(value, param, words=self.words)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm: the kind of rows it is for, its options, and what the host asks of it.

    `alternatives`: options of which a request gives one; it holds instead of the others, and
    of the server's defaults the first one that is set holds. `exact_modes`: the words of
    `cache_mode` under which every step forwards the whole canvas. `whole_blocks`: what is to
    be written must be whole blocks. `takes_filters`: draws honour top_p and top_k.
    """

    name: str
    kind: str
    writes: str
    options: tuple[Option, ...]
    alternatives: tuple[str, ...] = ()
    exact_modes: tuple[str, ...] = ()
    whole_blocks: bool = False
    takes_filters: bool = False

    def option(self, name: str) -> Option | None:
        """Returns the option of that name, None if the algorithm has none."""
        return next((option for option in self.options if option.name == name), None)

    @property
    def defaults(self) -> dict[str, Value | None]:
        """What each option is when neither request nor server says."""
        return {option.name: option.default for option in self.options}

    def forwards_whole_canvas(self, cache_mode: str | None) -> bool:
        """Returns whether every step of a row forwards all of its canvas."""
        if self.option("cache_mode") is None:
            return self.kind == CANVAS
        return cache_mode in self.exact_modes


def _number(name: str, default: float | None, help: str, **bounds: Any) -> Option:
    return Option(name=name, type="number", default=default, help=help, **bounds)


def _share(name: str, default: float, help: str) -> Option:
    return _number(name, default, help, high=1)


def _integer(name: str, default: int | None, help: str, **bounds: Any) -> Option:
    bounds = {"high": value_checks.LARGEST_INTEGER} | bounds
    return Option(name=name, type="integer", default=default, help=help, **bounds)


def _word(name: str, words: tuple[str, ...], help: str) -> Option:
    return Option(name=name, type="word", default=words[0], help=help, words=words)


_CONFIDENCE = "the probability above which a masked position is written"
_ENTROPY = "the entropy in nats up to which a masked position is written"
_CACHE_MODE = "what a step forwards, and so what it takes from the cache"
_BLOCK_LENGTH = _integer(
    "block_length", 32, "positions of a block", low=1, padding=1, counts_positions=True
)
_STEPS = "steps in which the whole output is written"

# Defaults of SGLang 0.5.23 (low_confidence.py, joint_threshold.py) and of the papers' releases.
# The first algorithm of a kind is its default.
TABLE: dict[str, Algorithm] = {
    "LowConfidence": Algorithm(
        name="LowConfidence",
        kind=BLOCK,
        writes="where the probability exceeds `threshold`, the surest position otherwise",
        options=(_share("threshold", 0.95, _CONFIDENCE),),
        takes_filters=True,
    ),
    "JointThreshold": Algorithm(
        name="JointThreshold",
        kind=BLOCK,
        writes="as `LowConfidence` does, and replaces written tokens by surer ones",
        options=(
            _share("threshold", 0.5, _CONFIDENCE),
            _share("edit_threshold", 0.0, "the probability above which a token is replaced"),
            _integer("max_post_edit_steps", 16, "steps of a block after its last mask", high=4096),
            _number("penalty_lambda", 0.0, "taken from the logit of the token to the left"),
        ),
        takes_filters=True,
    ),
    "FullAttnMultiBlock": Algorithm(
        name="FullAttnMultiBlock",
        kind=CANVAS,
        writes="several blocks at once, where the entropy (nats) is at most `threshold` (d3LLM)",
        options=(
            _number("threshold", 0.5, _ENTROPY),
            _share("block_add_threshold", 0.1, "written share of a block that begins the next"),
            _share("decoded_token_threshold", 0.95, "d3LLM's; never changes a result"),
            Option(
                name="early_stop",
                type="flag",
                default=True,
                help="whether all behind the first end token becomes the end of text at once",
            ),
            _word("cache_mode", ("exact", "delayed", "window"), _CACHE_MODE),
            _integer("cache_delay_iter", 2, "steps until a finished block is cached", padding=1),
            _integer(
                "refresh_interval", 3, "steps from one whole forward to the next", low=1, padding=1
            ),
            _BLOCK_LENGTH,
        ),
        exact_modes=("exact",),
    ),
    "EntropyThreshold": Algorithm(
        name="EntropyThreshold",
        kind=CANVAS,
        writes="one block after the other, by entropy",
        options=(_number("threshold", 0.95, _ENTROPY), _BLOCK_LENGTH),
    ),
    "LLaDA": Algorithm(
        name="LLaDA",
        kind=CANVAS,
        writes="a fixed number of positions a step, block after block",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _BLOCK_LENGTH,
            _word("remasking", ("low_confidence", "random"), "which positions are written first"),
            _number("cfg_scale", 0.0, "weight of classifier-free guidance; 0 is none"),
        ),
        whole_blocks=True,
    ),
    "Dream": Algorithm(
        name="Dream",
        kind=CANVAS,
        writes="a share of the whole canvas a step",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _word(
                "alg",
                ("origin", "maskgit_plus", "topk_margin", "entropy"),
                "which positions are written first: by chance, or by a confidence",
            ),
            _number("alg_temp", 0.0, "temperature of the choice by confidence; 0 takes the best"),
            _share("eps", 1e-3, "the time at which the schedule ends"),
        ),
    ),
    "FastDLLM": Algorithm(
        name="FastDLLM",
        kind=CANVAS,
        writes="one block after the other, where the probability is at least `threshold`; "
        "with `factor` or `steps`, by that instead",
        options=(
            _share("threshold", 0.9, "the probability from which on a position is written"),
            _number(
                "factor",
                None,
                "f: the n-th surest position is written from a probability of 1 - f / (n + 1) on",
                open_low=True,
                unset="unused",
            ),
            _integer("steps", None, _STEPS, low=1, unset="unused"),
            _BLOCK_LENGTH,
            _word("cache_mode", ("none", "prefix", "dual"), _CACHE_MODE),
        ),
        alternatives=("factor", "steps", "threshold"),
        exact_modes=("none",),
    ),
}


def of_kind(kind: str) -> dict[str, Algorithm]:
    """Returns the algorithms for rows of a kind; the first is the default."""
    return {name: algorithm for name, algorithm in TABLE.items() if algorithm.kind == kind}


def option_names() -> tuple[str, ...]:
    """Returns the names of all options of all algorithms."""
    names = (option.name for algorithm in TABLE.values() for option in algorithm.options)
    return tuple(dict.fromkeys(names))


def word(algorithm: str, option: str, value: str) -> int:
    """Returns what stands for a word of an option on the device."""
    found = TABLE[algorithm].option(option)
    assert found is not None, f"{algorithm} has no option {option}"
    return found.words.index(value)


def check(algorithm: str | None, name: str, value: Any) -> None:
    """Raises a `RequestError` unless the option may hold `value`.

    Without an algorithm it is enough that the option of any algorithm may.
    """
    if algorithm is None:
        _widest(name).check(value)
        return
    option = TABLE[algorithm].option(name)
    if option is None:
        known = ", ".join(TABLE[algorithm].defaults)
        raise errors.RequestError(
            f"{algorithm} has no option {name!r}; it has {known}", param=f"dllm.{name}"
        )
    option.check(value)


def _widest(name: str) -> Option:
    found = [row.option(name) for row in TABLE.values()]
    options = [option for option in found if option is not None]
    words = dict.fromkeys(word for option in options for word in option.words)
    return dataclasses.replace(
        options[0],
        low=min(option.low for option in options),
        high=max(option.high for option in options),
        open_low=all(option.open_low for option in options),
        words=tuple(words),
    )


# The arrays of many rows: one per option of any algorithm of the kind, in one order.


def arrays_of(kind: str) -> dict[str, Option]:
    """Returns the options of a kind of rows by name, in the order of their arrays."""
    found: dict[str, Option] = {}
    for algorithm in of_kind(kind).values():
        for option in algorithm.options:
            found.setdefault(option.name, option)
    return found


def padding(kind: str, rows: int) -> Arrays:
    """Returns the arrays [R] of rows without options."""
    return {
        name: np.full((rows,), option.padding, _DTYPES[option.type])
        for name, option in arrays_of(kind).items()
    }


def fill(
    arrays: Arrays,
    row: int,
    algorithm: str | None,
    options: Mapping[str, Value],
    *,
    row_length: int,
) -> None:
    """Puts the options that are set into `arrays[...][row]`; `row_length` is in positions."""
    assert algorithm is not None, "options are resolved before they travel"
    for name, value in options.items():
        option = TABLE[algorithm].option(name)
        assert option is not None, f"{algorithm} has no option {name}"
        if option.type == "word":
            value = option.words.index(str(value))
        elif option.counts_positions:
            value = min(int(value), row_length)  # means the same, and sums of it stay in 32 bits
        arrays[name][row] = value


# What the documentation shows.


def markdown_table(kind: str) -> str:
    """Returns the algorithms of a kind with their options and defaults, as a table."""
    lines = ["| algorithm | writes | options and their defaults |", "|---|---|---|"]
    for number, algorithm in enumerate(of_kind(kind).values()):
        name = f"`{algorithm.name}`" + (" (the default)" if number == 0 else "")
        options = ", ".join(_shown(option) for option in algorithm.options)
        if algorithm.alternatives:
            options += f"; a request gives one of {', '.join(algorithm.alternatives)}"
        lines.append(f"| {name} | {algorithm.writes} | {options} |")
    return "\n".join(lines)


def markdown_options(kind: str) -> str:
    """Returns what each option of a kind means, as a table."""
    lines = ["| option | of | values | meaning |", "|---|---|---|---|"]
    meanings: dict[tuple[str, str, str], list[str]] = {}
    for algorithm in of_kind(kind).values():
        for option in algorithm.options:
            meaning = (option.name, _values(option), option.help)
            meanings.setdefault(meaning, []).append(f"`{algorithm.name}`")
    for (name, values, help), owners in sorted(meanings.items()):
        lines.append(f"| `{name}` | {', '.join(owners)} | {values} | {help} |")
    return "\n".join(lines)


def _shown(option: Option) -> str:
    match option.default:
        case None:
            default = f"({option.unset})"
        case bool():
            default = str(option.default).lower()
        case float():
            default = f"{option.default:g}"
        case _:
            default = str(option.default)
    return f"`{option.name}` {default}"


def _values(option: Option) -> str:
    if option.type == "word":
        return ", ".join(option.words)
    if option.type == "flag":
        return "true, false"
    low = f"above {option.low:g}" if option.open_low else f"{option.low:g}"
    if option.high in (math.inf, value_checks.LARGEST_INTEGER):
        return low if option.open_low else f"{low} and above"
    return f"{low} to {option.high:g}"
