"""The device side of a third kind of rows: states in slots, one loop that gathers frames."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.device import facts
from jdllm.runner.launch import driver, interrupts, program
from jdllm.runner.launch.rows import select
from jdllm.scheduler.batch import Bucket, Frame, LaunchResult, RowResult, ScheduleBatch

WIDTH = 3  # numbers of a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """[R] rows: what is made, and steps done and to be done."""

    value: jax.Array  # int32 [R, WIDTH]
    step: jax.Array  # int32 [R]
    num_steps: jax.Array  # int32 [R]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the host knows of R rows; padding rows have a slot past the last."""

    slot: Any
    is_fresh: Any
    seed: Any
    num_steps: Any
    limits: driver.LaunchLimits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Frames of the launch, [R, K, WIDTH], `count` of them, and where the rows stand."""

    frames: Any
    count: Any
    step: Any
    num_steps: Any
    steps_run: Any


def advance(value: Any, step: Any) -> Any:
    """Returns the vector after step number `step`, from 1; wraps around in 32 bits."""
    return value * np.int32(747796405) + np.int32(12345) * step


@dataclasses.dataclass(frozen=True)
class Body:
    is_row: jax.Array
    weight: jax.Array
    variants: tuple[int, ...] = (0,)

    def is_finished(self, rows: State) -> jax.Array:
        return (rows.step >= rows.num_steps) & self.is_row

    def is_active(self, rows: State) -> jax.Array:
        return (rows.step < rows.num_steps) & self.is_row

    def written(self, rows: State) -> jax.Array:
        return rows.value

    def choose(self, rows: State) -> jax.Array:
        return jnp.int32(0)

    def step(self, variant: int, carry: driver.Carry) -> driver.Carry:
        state, active = carry.rows, self.is_active(carry.rows)
        after = advance(state.value, (state.step + 1)[:, None]) + self.weight
        value = jnp.where(active[:, None], after, state.value)
        frames, count = carry.gathered
        here = active[:, None] & (jnp.arange(frames.shape[1]) == count[:, None])
        return dataclasses.replace(
            carry,
            rows=State(value, state.step + active, state.num_steps),
            gathered=(jnp.where(here[..., None], value[:, None], frames), count + active),
            num_steps=carry.num_steps + 1,
        )


class ToyKind:
    """`max_launch_steps`: frames that a launch has room for."""

    def __init__(self, num_slots: int, max_launch_steps: int, folds: bool):
        self.num_slots, self.max_launch_steps, self.folds = num_slots, max_launch_steps, folds

    def create_memory(self) -> program.Memory:
        N = self.num_slots
        zeros = jnp.zeros((N,), jnp.int32)
        return {"slots": State(jnp.zeros((N, WIDTH), jnp.int32), zeros, zeros + 0)}

    def program(self, bucket: Bucket) -> program.Program:
        return program.Program(step=self.step, uses=("slots",), inputs=self.inputs, results=results)

    def inputs(self, batch: ScheduleBatch, interrupt: interrupts.Interrupt) -> Inputs:
        R = batch.bucket.rows
        slot, is_fresh = np.full((R,), self.num_slots, np.int32), np.zeros((R,), bool)
        seed, num_steps = np.zeros((R,), np.int32), np.zeros((R,), np.int32)
        for i, row in enumerate(batch.rows):
            slot[i], is_fresh[i] = row.stay.slot, row.is_fresh
            seed[i], num_steps[i] = row.request.seed, row.request.max_new_tokens
        return Inputs(slot, is_fresh, seed, num_steps, driver.LaunchLimits.of(batch, interrupt))

    def step(
        self, params: program.Params, memory: program.Memory, inputs: Inputs
    ) -> tuple[program.Memory, Outputs]:
        slots: State = memory["slots"]
        R = inputs.slot.shape[0]
        zeros = jnp.zeros((R,), jnp.int32)
        kept = jax.tree.map(lambda leaf: leaf[jnp.minimum(inputs.slot, self.num_slots - 1)], slots)
        fresh = State(jnp.broadcast_to(inputs.seed[:, None], (R, WIDTH)), zeros, inputs.num_steps)
        begin = driver.Carry.begin(
            inputs.limits,
            memory=(),
            rows=select(inputs.is_fresh, fresh, kept),
            gathered=(jnp.zeros((R, self.max_launch_steps, WIDTH), jnp.int32), zeros),
            num_counts=0,
        )
        body = Body(inputs.slot < self.num_slots, params["weight"])
        carry = driver.run(body, begin, inputs.limits, folds=self.folds, implementation="auto")
        state, (frames, count) = carry.rows, carry.gathered
        slots = jax.tree.map(
            lambda old, new: old.at[inputs.slot].set(new, mode="drop"), slots, state
        )
        outputs = Outputs(frames, count, state.step, state.num_steps, carry.num_steps)
        return {"slots": slots}, outputs


def results(outputs: Outputs, batch: ScheduleBatch) -> LaunchResult:
    rows = []
    for i in range(len(batch.rows)):
        count, step = int(outputs.count[i]), int(outputs.step[i])
        frames = tuple(
            Frame(step=step - count + k + 1, value=outputs.frames[i, k]) for k in range(count)
        )
        is_done = bool(frames) and step == outputs.num_steps[i]
        product = frames[-1].value if is_done else None
        rows.append(RowResult(nfe=count, frames=frames, product=product))
    steps = int(outputs.steps_run)
    return LaunchResult(
        rows=tuple(rows),
        num_steps=steps,
        computed_tokens=steps * batch.bucket.rows,
        real_tokens=sum(row.nfe for row in rows),
    )


def build(graphdef: Any, config: Any, device: facts.DeviceFacts) -> ToyKind:
    """Returns the kind as `engine/start/kinds.py` would build it."""
    del graphdef, device
    return ToyKind(config.num_slots, config.max_launch_steps, folds=True)
