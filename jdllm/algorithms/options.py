"""What an algorithm and an option of it are; `algorithms` declares all there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jdllm import value_checks

BLOCK, CANVAS, UNIFORM = "block", "canvas", "uniform"  # kinds of rows
Value = float | int | bool | str


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

    def checked(self, value: Any) -> Value:
        """Returns `value`, or raises a `RequestError` that names the option if it may not hold it.

        A whole number in the place of an integer becomes one.
        """
        param = f"dllm.{self.name}"
        match self.type:
            case "number":
                value_checks.check_number(value, param, low=self.low, high=self.high)
            case "integer":
                low, high = int(self.low), int(self.high)
                return value_checks.check_integer(value, param, low=low, high=high)
            case "flag":
                value_checks.check_flag(value, param)
            case "word":
                value_checks.check_word(value, param, words=self.words)
        return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm: the kind of rows it is for, its options, and what the host must know of it.

    `alternatives`: options that exclude one another; a request gives at most one. Without one, the
    first of them that has a default applies. `exact_modes`: the words of `cache_mode` with which
    every step forwards the whole canvas. `whole_blocks`: the positions to write must form whole
    blocks. `takes_filters`: the algorithm applies top_p and top_k when it draws a token.
    `has_own_temperature`: its options say how it draws; of a request it takes the temperatures 1,
    which leaves that as it is, and 0, with which the most probable token is "drawn".
    `moves_tokens`: it moves them inside a block, by edit tokens, which the model must have; so no
    rule for single positions of the output can hold. `families`: those that it is for, of the
    families whose rows are blocks; causal ones compute K,V of a written block by a causal forward.
    `drafts`: the causal forward decides what is written, so there are no steps to show.
    `uses_draft_adapter`: steps make the drafts, with the model's adapter for that, if it has one.
    """

    name: str
    kind: str
    writes: str
    options: tuple[Option, ...]
    alternatives: tuple[str, ...] = ()
    exact_modes: tuple[str, ...] = ()
    whole_blocks: bool = False
    takes_filters: bool = False
    has_own_temperature: bool = False
    moves_tokens: bool = False
    families: Literal["all", "block_causal", "causal"] = "all"
    drafts: bool = False
    uses_draft_adapter: bool = False

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
