"""The decoding algorithms and their options, each declared once, here.

Everything else that knows an option reads this table: the checks and defaults of requests
(`sampling_params`) and of the server (`config`, `engine/build/`), the help of the command line,
the tables of the documentation, and the arrays that carry the options of many rows to the
device. `decoding/` holds one rule for each algorithm; it takes the numbers of words and the names
of the arrays from here.

Several algorithms may have an option of the same name. They then agree on its type and its
padding; default, range and words may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from jdllm import errors, value_checks

BLOCK, CANVAS = "block", "canvas"  # kinds of rows
Value = float | int | bool | str
Arrays = dict[str, Shaped[np.ndarray, " R"]]
_DTYPES = {"number": np.float32, "integer": np.int32, "flag": np.bool_, "word": np.int32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of an algorithm.

    A number lies in [low, high], where float32 computes with it without overflow and without
    rounding it to 0. A word is one of `words`; the device gets its index there. A `default` of
    None means that the option is not set; `unset` says what happens then. `padding` is the value
    in the array for rows without the option. `counts_positions`: the value is a number of
    positions, so the algorithm treats a value above the length of the row like that length.
    `only_with`: an option of the algorithm, and those of its words with which this option exists.
    """

    name: str
    type: Literal["number", "integer", "flag", "word"]
    default: Value | None
    help: str
    low: float = 0
    high: float = 1
    words: tuple[str, ...] = ()
    unset: str = ""
    padding: int = 0
    counts_positions: bool = False
    only_with: tuple[str, tuple[str, ...]] | None = None

    def check(self, value: Any) -> None:
        """Raises a `RequestError` that names the option unless it may hold `value`."""
        param = f"dllm.{self.name}"
        match self.type:
            case "number":
                value_checks.check_number(value, param, low=self.low, high=self.high)
            case "integer":
                value_checks.check_integer(value, param, low=int(self.low), high=int(self.high))
            case "flag":
                value_checks.check_flag(value, param)
            case "word":
                value_checks.check_word(value, param, words=self.words)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm: the kind of rows it is for, its options, and what the host must know of it.

    `alternatives`: options that exclude one another; a request gives at most one. Without one, the
    first of them that has a default applies. `exact_modes`: the words of `cache_mode` with which
    every step forwards the whole canvas. `whole_blocks`: the positions to write must form whole
    blocks. `takes_filters`: the algorithm applies top_p and top_k when it draws a token.
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
        """Returns the option of that name, or None if the algorithm has none."""
        return next((option for option in self.options if option.name == name), None)

    @property
    def defaults(self) -> dict[str, Value | None]:
        """The value of each option that neither the request nor the server sets."""
        return {option.name: option.default for option in self.options}

    def without_meaning(self, values: Mapping[str, Value | None]) -> list[Option]:
        """Returns the options that do not exist with these values of the others."""
        return [
            option
            for option in self.options
            if option.only_with is not None
            and values[option.only_with[0]] not in option.only_with[1]
        ]

    def forwards_whole_canvas(self, cache_mode: str | None) -> bool:
        """Returns whether every step of a row forwards its whole canvas."""
        if self.option("cache_mode") is None:
            return self.kind == CANVAS
        return cache_mode in self.exact_modes


def _number(name: str, default: float | None, help: str, **bounds: Any) -> Option:
    return Option(name=name, type="number", default=default, help=help, **bounds)


def _share(name: str, default: float, help: str, **bounds: Any) -> Option:
    return _number(name, default, help, high=1, **bounds)


def _integer(name: str, default: int | None, help: str, **bounds: Any) -> Option:
    bounds = {"high": value_checks.LARGEST_INTEGER} | bounds
    return Option(name=name, type="integer", default=default, help=help, **bounds)


def _word(name: str, words: tuple[str, ...], help: str) -> Option:
    return Option(name=name, type="word", default=words[0], help=help, words=words)


_CONFIDENCE = "the probability above which a masked position is written"
_ENTROPY = "the highest entropy in nats at which a masked position is written"
_CACHE_MODE = "which positions a step forwards; it reads the others from the cache"
_BLOCK_LENGTH = _integer(
    "block_length", 32, "positions per block", low=1, padding=1, counts_positions=True
)
_STEPS = "number of steps for the whole output"
_LOWEST = "the lowest probability at which a position is written"
_ALL_POSITIONS = "as many as positions of the block"
# Nats; no vocabulary has so much entropy.
_MOST_ENTROPY = 100

# Defaults of SGLang 0.5.23 (low_confidence.py, joint_threshold.py) and of the papers' releases.
# The first algorithm of a kind is its default.
TABLE: dict[str, Algorithm] = {
    "LowConfidence": Algorithm(
        name="LowConfidence",
        kind=BLOCK,
        writes="positions with a probability above `threshold`, or else the most probable one",
        options=(_share("threshold", 0.95, _CONFIDENCE),),
        takes_filters=True,
    ),
    "JointThreshold": Algorithm(
        name="JointThreshold",
        kind=BLOCK,
        writes="as `LowConfidence` does, and replaces written tokens by more probable ones",
        options=(
            _share("threshold", 0.5, _CONFIDENCE),
            _share("edit_threshold", 0.0, "the probability above which a token replaces another"),
            _integer(
                "max_post_edit_steps",
                16,
                "most steps of a block after its last mask is written",
                high=4096,
            ),
            _number(
                "penalty_lambda",
                0.0,
                "subtracted from the logit of the token to the left",
                high=100,
            ),
        ),
        takes_filters=True,
    ),
    "SDAR": Algorithm(
        name="SDAR",
        kind=BLOCK,
        writes="by SDAR's own rules: every step of a block writes its share of the positions, and "
        "`low_confidence_dynamic` all with a probability above `threshold` if these are more",
        options=(
            _word(
                "remasking_strategy",
                (
                    "low_confidence_dynamic",
                    "low_confidence_static",
                    "sequential",
                    "entropy_bounded",
                ),
                "which masked positions of the block a step writes",
            ),
            _share(
                "threshold",
                0.85,
                _CONFIDENCE,
                only_with=("remasking_strategy", ("low_confidence_dynamic",)),
            ),
            _integer(
                "denoising_steps",
                None,
                "steps of a block; each writes its share of the positions",
                low=1,
                counts_positions=True,
                unset=_ALL_POSITIONS,
                only_with=(
                    "remasking_strategy",
                    ("low_confidence_dynamic", "low_confidence_static", "sequential"),
                ),
            ),
            _number(
                "eb_threshold",
                0.35,
                "the highest sum of the entropies (nats) of the positions that a step writes",
                high=_MOST_ENTROPY,
                only_with=("remasking_strategy", ("entropy_bounded",)),
            ),
        ),
        takes_filters=True,
    ),
    "MaskedDiffusion": Algorithm(
        name="MaskedDiffusion",
        kind=BLOCK,
        writes="positions with a probability of at least `threshold`, and the most probable one; "
        "`low_confidence` and `leftmost` write a number of positions per step instead",
        options=(
            _word(
                "selection_policy",
                ("confidence_threshold", "low_confidence", "leftmost"),
                "which masked positions of the block a step writes",
            ),
            _share(
                "threshold",
                0.9,
                _LOWEST,
                only_with=("selection_policy", ("confidence_threshold",)),
            ),
            _integer(
                "max_denoising_steps",
                None,
                "most steps of a block; the last one writes all that are left",
                low=1,
                counts_positions=True,
                unset=_ALL_POSITIONS,
            ),
        ),
        takes_filters=True,
    ),
    "FullAttnMultiBlock": Algorithm(
        name="FullAttnMultiBlock",
        kind=CANVAS,
        writes="several blocks at once: positions with an entropy (nats) of at most `threshold` "
        "(d3LLM)",
        options=(
            _number("threshold", 0.5, _ENTROPY, high=_MOST_ENTROPY),
            _share(
                "block_add_threshold",
                0.1,
                "share of a block that must be written before the next one begins",
            ),
            _share(
                "decoded_token_threshold", 0.95, "an option of d3LLM; it never changes a result"
            ),
            Option(
                name="early_stop",
                type="flag",
                default=True,
                help="whether all positions after the first end token become the end of text at "
                "once",
            ),
            _word("cache_mode", ("exact", "delayed", "window"), _CACHE_MODE),
            _integer("cache_delay_iter", 2, "steps until a finished block is cached", padding=1),
            _integer(
                "refresh_interval",
                3,
                "steps from one forward of the whole canvas to the next",
                low=1,
                padding=1,
            ),
            _BLOCK_LENGTH,
        ),
        exact_modes=("exact",),
    ),
    "EntropyThreshold": Algorithm(
        name="EntropyThreshold",
        kind=CANVAS,
        writes="one block after the other, by entropy",
        options=(_number("threshold", 0.95, _ENTROPY, high=_MOST_ENTROPY), _BLOCK_LENGTH),
    ),
    "LLaDA": Algorithm(
        name="LLaDA",
        kind=CANVAS,
        writes="a fixed number of positions per step, block after block",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _BLOCK_LENGTH,
            _word("remasking", ("low_confidence", "random"), "which positions are written first"),
            _number("cfg_scale", 0.0, "weight of classifier-free guidance; 0 is none", high=100),
        ),
        whole_blocks=True,
    ),
    "Dream": Algorithm(
        name="Dream",
        kind=CANVAS,
        writes="a share of the whole canvas per step",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _word(
                "alg",
                ("origin", "maskgit_plus", "topk_margin", "entropy"),
                "how a step chooses its positions: by chance, or by a measure of confidence",
            ),
            _number(
                "alg_temp",
                0.0,
                "temperature of the choice by confidence; 0 takes the best",
                high=100,
            ),
            _share("eps", 1e-3, "the time at which the schedule ends"),
        ),
    ),
    "FastDLLM": Algorithm(
        name="FastDLLM",
        kind=CANVAS,
        writes="one block after the other: positions with a probability of at least `threshold`; "
        "`factor` or `steps` replaces that rule",
        options=(
            _share("threshold", 0.9, _LOWEST),
            _number(
                "factor",
                None,
                "f: the n-th most probable position is written if its probability is at least "
                "1 - f / (n + 1)",
                low=0.001,
                high=10000,
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
    """Returns the algorithms for rows of a kind; the first one is the default."""
    return {name: algorithm for name, algorithm in TABLE.items() if algorithm.kind == kind}


def option_names() -> tuple[str, ...]:
    """Returns the names of all options of all algorithms."""
    names = (option.name for algorithm in TABLE.values() for option in algorithm.options)
    return tuple(dict.fromkeys(names))


def word(algorithm: str, option: str, value: str) -> int:
    """Returns the number that stands for a word of an option on the device."""
    found = TABLE[algorithm].option(option)
    assert found is not None, f"{algorithm} has no option {option}"
    return found.words.index(value)


def check(algorithm: str | None, name: str, value: Any) -> None:
    """Raises a `RequestError` unless the option may hold `value`.

    Without an algorithm, the widest range over all algorithms holds.
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
        words=tuple(words),
    )


# The arrays of many rows: one for each option of the kind's algorithms, in a fixed order.


def arrays_of(kind: str) -> dict[str, Option]:
    """Returns the options of a kind of rows by name, in the order of their arrays."""
    found: dict[str, Option] = {}
    for algorithm in of_kind(kind).values():
        for option in algorithm.options:
            found.setdefault(option.name, option)
    return found


def padding(kind: str, rows: int) -> Arrays:
    """Returns the arrays of rows without options."""
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
    """Writes the options that are set into `arrays[...][row]`; `row_length` is in positions."""
    assert algorithm is not None, "the caller must resolve the options first"
    for name, value in options.items():
        option = TABLE[algorithm].option(name)
        assert option is not None, f"{algorithm} has no option {name}"
        if option.type == "word":
            value = option.words.index(str(value))
        elif option.counts_positions:
            value = min(int(value), row_length)  # the same meaning, and its sums fit into 32 bits
        arrays[name][row] = value


# The tables of the documentation.


def markdown_table(kind: str) -> str:
    """Returns the algorithms of a kind with their options and defaults, as a table."""
    lines = ["| algorithm | writes | options and their defaults |", "|---|---|---|"]
    for number, algorithm in enumerate(of_kind(kind).values()):
        name = f"`{algorithm.name}`" + (" (the default)" if number == 0 else "")
        options = ", ".join(_shown(option) for option in algorithm.options)
        if algorithm.alternatives:
            options += f"; a request gives at most one of {', '.join(algorithm.alternatives)}"
        lines.append(f"| {name} | {algorithm.writes} | {options} |")
    return "\n".join(lines)


def markdown_options(kind: str) -> str:
    """Returns a table of what each option of a kind means."""
    lines = ["| option | algorithms | values | meaning |", "|---|---|---|---|"]
    meanings: dict[tuple[str, str, str], list[str]] = {}
    for algorithm in of_kind(kind).values():
        for option in algorithm.options:
            meaning = (option.name, _values(option), _meaning(option))
            meanings.setdefault(meaning, []).append(f"`{algorithm.name}`")
    for (name, values, help), owners in sorted(meanings.items()):
        lines.append(f"| `{name}` | {', '.join(owners)} | {values} | {help} |")
    return "\n".join(lines)


def _meaning(option: Option) -> str:
    if option.only_with is None:
        return option.help
    name, words = option.only_with
    return f"{option.help}; only with `{name}` {' or '.join(words)}"


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
    if option.high == value_checks.LARGEST_INTEGER:
        return f"{option.low:g} and above"
    return f"{option.low:g} to {option.high:g}"
