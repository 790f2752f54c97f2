"""The loop of a launch: steps of its rows on the device, without the host, until something ends it.

A kind says what a step is (`Body`); the driver runs steps until the rows are finished, enough of
them are for others to have their places, the launch has had its steps, or the host asks.

A step has variants of other compiled sizes, and each has a loop of its own that runs as long as
its variant is the right one. A conditional inside one loop would make XLA copy the KV pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.runner.launch import interrupts, words
from jdllm.scheduler import batch as batch_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimits:
    """When a launch ends though rows could go on; every kind's inputs hold them.

    After `max_steps` steps, when more than `max_finished` rows are finished, or when the host asks.
    """

    max_steps: Any  # int32 scalar
    max_finished: Any  # int32 scalar
    interrupt: interrupts.Interrupt

    @classmethod
    def of(cls, batch: batch_lib.ScheduleBatch, interrupt: interrupts.Interrupt) -> LaunchLimits:
        """Returns what a batch says; without a limit of finished rows that is all of them."""
        most = batch.bucket.rows if batch.max_finished is None else batch.max_finished
        return cls(
            max_steps=np.int32(batch.max_steps), max_finished=np.int32(most), interrupt=interrupt
        )


def shapes() -> LaunchLimits:
    """Returns the shapes of a launch's limits."""
    scalar = jax.ShapeDtypeStruct((), np.int32)
    return LaunchLimits(max_steps=scalar, max_finished=scalar, interrupt=interrupts.shapes())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What goes from step to step.

    `memory` is updated in place (the KV pool), `rows` are the states of the rows, their tokens
    first, `gathered` is what the launch collects for the host beside them, such as an output of
    each step. `counts` are totals of the kind's own.
    """

    memory: Any
    rows: Any
    gathered: Any
    cancel_flag: jax.Array  # int32 scalar, as it was read last
    num_steps: jax.Array  # int32 scalar
    counts: tuple[jax.Array, ...]  # int32 scalars

    @classmethod
    def begin(
        cls, limits: LaunchLimits, *, memory: Any, rows: Any, gathered: Any = (), num_counts: int
    ) -> Carry:
        """Returns the carry of a launch that has had no step."""
        return cls(
            memory=memory,
            rows=rows,
            gathered=gathered,
            cancel_flag=limits.interrupt.count,
            num_steps=jnp.int32(0),
            counts=(jnp.int32(0),) * num_counts,
        )


class Body(Protocol):
    """A kind's part of the loop. `variants` are the compiled forms of its step."""

    @property
    def variants(self) -> tuple[Any, ...]:
        """Sizes, or whatever tells one form of the step from another."""
        ...

    def is_finished(self, rows: Any) -> jax.Array:
        """Returns bool [R]: real rows that no launch forwards any more."""
        ...

    def is_active(self, rows: Any) -> jax.Array:
        """Returns bool [R]: rows that the next step forwards."""
        ...

    def choose(self, rows: Any) -> jax.Array:
        """Returns int32: the place in `variants` of the next step's."""
        ...

    def step(self, variant: Any, carry: Carry) -> Carry:
        """Returns the carry after a step of that form; counts its forwards in `num_steps`."""
        ...


def run(
    body: Body, begin: Carry, limits: LaunchLimits, *, folds: bool = False, implementation: str
) -> Carry:
    """Returns the carry after the launch's last step.

    `folds`: all scalars and vectors but those of the memory travel as one vector of words.
    """
    folding = words.Folding.of(_but_memory(begin)) if folds else None

    def fold(carry: Carry) -> Any:
        rest = _but_memory(carry)
        return carry.memory, rest if folding is None else folding.fold(rest)

    def unfold(folded: Any) -> Carry:
        memory, rest = folded
        carry = rest if folding is None else folding.unfold(rest)
        return dataclasses.replace(carry, memory=memory)

    def goes_on(folded: Any) -> jax.Array:
        carry = unfold(folded)
        waited_for = jnp.sum(body.is_finished(carry.rows)) > limits.max_finished
        is_over = waited_for | limits.interrupt.stop_requested(carry.cancel_flag)
        is_active = jnp.any(body.is_active(carry.rows))
        return (carry.num_steps < limits.max_steps) & is_active & ~is_over

    def one_step(variant: Any, folded: Any) -> Any:
        carry = body.step(variant, unfold(folded))
        written = jax.tree.leaves(carry.rows)[0]  # the flag is read once the step is done
        flag = limits.interrupt.poll(written, implementation=implementation)
        return fold(dataclasses.replace(carry, cancel_flag=flag))

    def all_variants(folded: Any) -> Any:
        for place, variant in enumerate(body.variants):
            folded = jax.lax.while_loop(
                lambda now, place=place: goes_on(now) & (body.choose(unfold(now).rows) == place),
                functools.partial(one_step, variant),
                folded,
            )
        return folded

    return unfold(jax.lax.while_loop(goes_on, all_variants, fold(begin)))


def _but_memory(carry: Carry) -> Carry:
    return dataclasses.replace(carry, memory=())
