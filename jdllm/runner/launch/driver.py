"""The loop of a launch: the device runs step after step, without the host, until the launch ends.

A kind of rows says what a step is (`Body`). The driver runs steps until one of four things happens:
no row is active, more rows than `LaunchLimits.max_finished` are finished (other requests wait for
their places), the launch has run `max_steps` steps, or the host asks for an end.

A step has several compiled variants, which differ in size. Each variant has an inner loop of its
own, which runs as long as `Body.choose` returns that variant. A conditional inside one loop would
make XLA copy the KV pool.

Letters: R rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jdllm.runner.launch import interrupts, words
from jdllm.scheduler.batch import ScheduleBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimits:
    """When a launch ends although rows could go on; the inputs of every kind hold one.

    The launch ends after `max_steps` steps, when more than `max_finished` rows are finished, or
    when the host asks. The fields are numpy's on the host and traced in the launch.
    """

    max_steps: Int32[Any, ""]
    max_finished: Int32[Any, ""]
    interrupt: interrupts.Interrupt

    @classmethod
    def of(cls, batch: ScheduleBatch, interrupt: interrupts.Interrupt) -> LaunchLimits:
        """Returns the limits of a batch; without `max_finished` all of its rows may finish."""
        max_finished = batch.bucket.rows if batch.max_finished is None else batch.max_finished
        return cls(
            max_steps=np.int32(batch.max_steps),
            max_finished=np.int32(max_finished),
            interrupt=interrupt,
        )


def shapes() -> LaunchLimits:
    """Returns the shapes of a launch's limits."""
    scalar = jax.ShapeDtypeStruct((), np.int32)
    return LaunchLimits(max_steps=scalar, max_finished=scalar, interrupt=interrupts.shapes())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What one step hands to the next.

    `memory` is updated in place (the KV pool). `rows` are the states of the rows. `gathered` is
    what the launch collects for the host besides, such as an output of each step. `counts` are
    totals that the kind defines. `cancel_flag` is the flag of `interrupts.py` as it was last read.
    """

    memory: Any
    rows: Any
    gathered: Any
    cancel_flag: Int32[Array, ""]
    num_steps: Int32[Array, ""]
    counts: tuple[Int32[Array, ""], ...]

    @classmethod
    def begin(
        cls, limits: LaunchLimits, *, memory: Any, rows: Any, gathered: Any = (), num_counts: int
    ) -> Carry:
        """Returns the carry before the first step."""
        return cls(
            memory=memory,
            rows=rows,
            gathered=gathered,
            cancel_flag=limits.interrupt.count,
            num_steps=jnp.int32(0),
            counts=(jnp.int32(0),) * num_counts,
        )


class Body(Protocol):
    """What a kind of rows adds to the loop. `variants` are the compiled forms of its step."""

    @property
    def variants(self) -> tuple[Any, ...]:
        """The sizes, or whatever else distinguishes the forms of the step."""
        ...

    def is_finished(self, rows: Any) -> Bool[Array, " R"]:
        """Returns which real rows no launch forwards any more."""
        ...

    def is_active(self, rows: Any) -> Bool[Array, " R"]:
        """Returns which rows the next step forwards."""
        ...

    def written(self, rows: Any) -> Array:
        """Returns an array that every step writes; the cancel flag is read after it."""
        ...

    def choose(self, rows: Any) -> Int32[Array, ""]:
        """Returns the index in `variants` of the form that the next step has."""
        ...

    def step(self, variant: Any, carry: Carry) -> Carry:
        """Returns the carry after one step of this form; adds its forwards to `num_steps`."""
        ...


def run(
    body: Body,
    begin: Carry,
    limits: LaunchLimits,
    *,
    folds: bool = False,
    implementation: str,
    num_ranks: int = 1,
) -> Carry:
    """Returns the carry after the launch's last step.

    With `folds`, the loop carries all scalars and vectors outside `memory` as one vector of words.
    With `num_ranks`, it runs on each rank of a mesh, and all of them leave it at the same step.
    """
    folding = words.Folding.of(_without_memory(begin)) if folds else None

    def fold(carry: Carry) -> Any:
        rest = _without_memory(carry)
        return carry.memory, rest if folding is None else folding.fold(rest)

    def unfold(folded: Any) -> Carry:
        memory, rest = folded
        carry = rest if folding is None else folding.unfold(rest)
        return dataclasses.replace(carry, memory=memory)

    def goes_on(folded: Any) -> Bool[Array, ""]:
        carry = unfold(folded)
        enough_finished = jnp.sum(body.is_finished(carry.rows)) > limits.max_finished
        is_over = enough_finished | limits.interrupt.stop_requested(carry.cancel_flag)
        is_active = jnp.any(body.is_active(carry.rows))
        return (carry.num_steps < limits.max_steps) & is_active & ~is_over

    def one_step(variant: Any, folded: Any) -> Any:
        carry = body.step(variant, unfold(folded))
        written = body.written(carry.rows)
        flag = limits.interrupt.poll(written, implementation=implementation, num_ranks=num_ranks)
        return fold(dataclasses.replace(carry, cancel_flag=flag))

    def all_variants(folded: Any) -> Any:
        for index, variant in enumerate(body.variants):
            folded = jax.lax.while_loop(
                lambda now, index=index: goes_on(now) & (body.choose(unfold(now).rows) == index),
                functools.partial(one_step, variant),
                folded,
            )
        return folded

    return unfold(jax.lax.while_loop(goes_on, all_variants, fold(begin)))


def _without_memory(carry: Carry) -> Carry:
    return dataclasses.replace(carry, memory=())
