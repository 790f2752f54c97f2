"""The array interface between steps and rules of models that denoise random tokens.

There is no mask: every position of a canvas holds some token, and a step may replace any of them.
The output of a canvas is not the canvas itself, but the most probable token of each position in
its last step. Every option of a request is a `[R]` array, so a new value never compiles a step.

Letters: R rows, L positions of a canvas.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float32, Int32

from jdllm.algorithms import lookup

# One field per option. Its type is Any, since a type checker cannot know the fields.
_Options: Any = dataclasses.make_dataclass(
    "UniformOptions",
    [(name, jax.Array) for name in lookup.arrays_of(lookup.UNIFORM)],
    frozen=True,
    slots=True,
    kw_only=True,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniformParams(_Options):
    """The options of all rules of this kind, [R] each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoisyCanvas:
    """The canvas that each row denoises.

    `best`: the most probable tokens of the step before, -1 before the first one. `same_steps`: how
    many steps in a row before that one had the same `best`. `step` counts the steps done.
    """

    tokens: Int32[Array, "R L"]
    best: Int32[Array, "R L"]
    same_steps: Int32[Array, " R"]
    step: Int32[Array, " R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a step found: `entropy` (nats) and `drawn` are those of the tempered distribution.

    `best` is the most probable token of each position; `noise` a fresh uniform token for each.
    """

    best: Int32[Array, "R L"]
    entropy: Float32[Array, "R L"]
    drawn: Int32[Array, "R L"]
    noise: Int32[Array, "R L"]


@runtime_checkable
class UniformAlgorithm(Protocol):
    """A rule; frozen dataclasses implement it, so it is hashable and static under jit."""

    def temperature(self, step: Int32[Array, " R"], params: UniformParams) -> Float32[Array, " R"]:
        """Returns the temperature of the logits in the step after `step` steps."""
        ...

    def denoise(
        self, canvas: NoisyCanvas, seen: Seen, params: UniformParams
    ) -> tuple[NoisyCanvas, Bool[Array, " R"]]:
        """Returns the canvas after a step, and whether `best` is the row's output."""
        ...
