"""What a training run needs to know of its recipe; the loop knows no more.

A recipe is one kind of model with its batches, its step, its evaluation and its export. `recipes`
names them all.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jdllm.train import clock

Params = dict[str, jax.Array]


class State(Protocol):
    """The content of a checkpoint: a pytree with the step, float32 weights and their average."""

    @property
    def step(self) -> Any: ...

    @property
    def params(self) -> Params: ...

    @property
    def average(self) -> Params: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What `--export-state` carries to another run: no moments of the optimiser."""

    step: int
    params: Params
    average: Params


class Batches(Protocol):
    """The batches of the steps from some step on; `close` ends whatever prepares them."""

    def __next__(self) -> Any: ...

    def close(self) -> None: ...


class Recipe(Protocol):
    """One run's recipe. A state that `step` got is consumed.

    `unit` is what a batch counts, in the plural.
    """

    unit: str

    @property
    def batch_size(self) -> int:
        """How many of the unit a step takes now."""
        ...

    def first_state(self) -> Any:
        """Returns a state at step 0."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each of a state's parameters."""
        ...

    def weights_of(self, folder: pathlib.Path) -> Weights:
        """Returns the weights of a model folder, or of a pipeline's, for a run from step 0."""
        ...

    def adopt(self, weights: Weights) -> Any:
        """Returns a state with these weights, fresh moments and a new warm-up."""
        ...

    def batches(self, state: Any, passed: clock.Passed) -> Batches:
        """Returns the batches of the steps that follow a state, which came after `passed`.

        Of these, the seconds of the run are those until now.
        """
        ...

    def passed(self) -> clock.Passed:
        """Returns what has passed until now."""
        ...

    def is_over(self, number: int) -> bool:
        """Returns whether the run ends after `number` steps, or because its time is up."""
        ...

    def step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, jax.Array]]:
        """Returns the next state, and metrics with a `loss` that stay on the device."""
        ...

    def evaluate(self, state: Any) -> dict[str, float]:
        """Returns how well the average does on held-out problems."""
        ...

    def export(self, state: Any, output_dir: pathlib.Path) -> None:
        """Writes the average as a model that is served."""
        ...

    def close(self) -> None:
        """Ends every process and thread of the run, also where a signal has ended a method."""
        ...
