"""The decoding algorithms and their options, each declared once, in `table.py`.

Everything else that knows an option (`options.py`) reads that table: the checks and defaults
of requests (`sampling_params`) and of the server (`config`, `engine/start/`), the help of the
command line, the tables of the documentation, and the arrays that carry the
options of many rows to the device. `decoding/` holds one rule for each algorithm; it takes the
numbers of words and the names of the arrays from here.

Several algorithms may have an option of the same name. They then agree on its type and its
padding; default, range and words may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jdllm import errors
from jdllm.algorithms.options import BLOCK, CANVAS, UNIFORM, Algorithm, Option, Value
from jdllm.algorithms.table import TABLE
from jdllm.foreign.names import Places

# What others use by this name, too.
__all__ = ["BLOCK", "CANVAS", "TABLE", "UNIFORM", "Algorithm", "Option", "Value"]

Arrays = dict[str, Shaped[np.ndarray, " R"]]
_DTYPES = {"number": np.float32, "integer": np.int32, "flag": np.bool_, "word": np.int32}


def of_kind(kind: str) -> dict[str, Algorithm]:
    """Returns the algorithms for rows of a kind; the first one is the default."""
    return {name: algorithm for name, algorithm in TABLE.items() if algorithm.kind == kind}


def described(names: Iterable[str]) -> dict[str, Any]:
    """Returns some algorithms with their options as JSON, for clients that show them."""
    fields = ("type", "default", "help", "low", "high", "words")
    return {
        name: {
            "writes": TABLE[name].writes,
            "alternatives": TABLE[name].alternatives,
            "options": {
                one.name: {field: getattr(one, field) for field in fields}
                for one in TABLE[name].options
            },
        }
        for name in names
    }


def option_names() -> tuple[str, ...]:
    """Returns the names of all options of all algorithms."""
    names = (option.name for algorithm in TABLE.values() for option in algorithm.options)
    return tuple(dict.fromkeys(names))


def places(pattern: str) -> Places:
    """Returns what stands in `dllm` as it is written elsewhere: `dllm.{}`."""
    return {pattern: ("algorithm", "stream_mode", *option_names())}


def is_flag(name: str) -> bool:
    """Says whether there is an option of that name that is true or false."""
    found = (algorithm.option(name) for algorithm in TABLE.values())
    return any(option is not None and option.type == "flag" for option in found)


def word(algorithm: str, option: str, value: str) -> int:
    """Returns the number that stands for a word of an option on the device."""
    found = TABLE[algorithm].option(option)
    assert found is not None, f"{algorithm} has no option {option}"
    return found.words.index(value)


def checked(algorithm: str | None, name: str, value: Any) -> Value:
    """Returns `value` as the option holds it, or raises a `RequestError`.

    Without an algorithm, the widest range over all algorithms holds.
    """
    if algorithm is None:
        return _widest(name).checked(value)
    option = TABLE[algorithm].option(name)
    if option is None:
        known = ", ".join(TABLE[algorithm].defaults)
        raise errors.RequestError(
            f"{algorithm} has no option {name!r}; it has {known}", param=f"dllm.{name}"
        )
    return option.checked(value)


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
