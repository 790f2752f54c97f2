"""The loop of a launch against a Python loop: which rows run, in which variant, until when."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.runner.launch import driver, interrupts

R, MOST = 5, 40


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """`left`: steps that a row still needs; `forms`: the variants of its steps, summed."""

    left: jax.Array  # int32 [R]
    forms: jax.Array  # int32 [R]


@dataclasses.dataclass(frozen=True)
class Body:
    """Row i needs `left[i]` steps; the step's form is the number of active rows, at most 3."""

    is_row: jax.Array
    variants: tuple[int, ...] = (1, 2, 3)

    def is_finished(self, rows):
        return (rows.left == 0) & self.is_row

    def is_active(self, rows):
        return rows.left > 0

    def written(self, rows):
        return rows.left

    def choose(self, rows):
        return jnp.minimum(jnp.sum(rows.left > 0), 3) - 1

    def step(self, variant, carry):
        active = self.is_active(carry.rows)
        return dataclasses.replace(
            carry,
            memory=[carry.memory[0].at[carry.num_steps].set(variant)],
            rows=Rows(carry.rows.left - active, carry.rows.forms + variant * active),
            num_steps=carry.num_steps + 1,
            counts=(carry.counts[0] + jnp.sum(active, dtype=jnp.int32),),
        )


@jax.jit
def run_plain(left, is_row, limits):
    return run(left, is_row, limits, folds=False)


@jax.jit
def run_folded(left, is_row, limits):
    return run(left, is_row, limits, folds=True)


def run(left, is_row, limits, folds):
    rows = Rows(left, jnp.zeros_like(left))
    memory = [jnp.zeros((MOST,), jnp.int32)]
    begin = driver.Carry.begin(limits, memory=memory, rows=rows, num_counts=1)
    return driver.run(Body(is_row), begin, limits, folds=folds, implementation="auto")


def expected(left, is_row, max_steps, max_finished):
    """Returns (left, forms, form of each step, rows forwarded)."""
    left, forms, steps, forwarded = left.copy(), np.zeros(R, int), [], 0
    while len(steps) < max_steps and left.any() and (is_row & (left == 0)).sum() <= max_finished:
        active = left > 0
        form = min(active.sum(), 3)
        steps.append(form)
        forms += form * active
        left -= active
        forwarded += active.sum()
    return left, forms, steps, forwarded


def limits_of(max_steps, max_finished):
    bucket = types.SimpleNamespace(rows=R)
    batch = types.SimpleNamespace(bucket=bucket, max_steps=max_steps, max_finished=max_finished)
    given = interrupts.Interrupts(implementation="xla").current()
    return jax.tree.map(jnp.asarray, driver.LaunchLimits.of(batch, given))


@pytest.mark.parametrize("seed", range(30))
def test_a_launch_is_the_loop_that_one_would_write(seed):
    rng = np.random.default_rng(seed)
    is_row = np.arange(R) < rng.integers(1, R + 1)
    left = rng.integers(0, 9, R) * is_row
    max_steps = int(rng.choice([1, 3, MOST]))
    max_finished = rng.choice([None, 0, 1, 3])
    bound = R if max_finished is None else max_finished
    want = expected(left, is_row, max_steps, bound)
    for one in (run_plain, run_folded):
        carry = one(
            jnp.asarray(left, jnp.int32), jnp.asarray(is_row), limits_of(max_steps, max_finished)
        )
        assert carry.rows.left.tolist() == want[0].tolist()
        assert carry.rows.forms.tolist() == want[1].tolist()
        assert carry.memory[0][: len(want[2])].tolist() == want[2]
        assert (int(carry.num_steps), int(carry.counts[0])) == (len(want[2]), want[3])


def test_a_stop_that_is_seen_ends_the_launch_after_its_step(monkeypatch):
    """The flag reads as asked for once a row has had its third step."""

    def poll(self, after, **_):
        return self.count + jnp.any(after == 4)

    monkeypatch.setattr(interrupts.Interrupt, "poll", poll)
    is_row = jnp.arange(R) < 1
    carry = jax.jit(lambda left: run(left, is_row, limits_of(MOST, None), folds=True))(
        jnp.where(is_row, 7, 0)
    )
    assert (int(carry.num_steps), int(carry.rows.left[0])) == (3, 4)
