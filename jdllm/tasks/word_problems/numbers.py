"""Numbers for the variables of a written problem: exact, positive and of a sensible size.

Variables are drawn in the order of the steps. What a step already knows limits the numbers that it
lacks: a subtrahend is below what is there, a dividend is a multiple. What depends on later steps
is a matter of luck and drawn again.
"""

from __future__ import annotations

import random

from jdllm.tasks import amounts
from jdllm.tasks.amounts import Impossible, Step
from jdllm.tasks.word_problems.written import Operand, WrittenProblem

TRIES = 100  # a problem that is harder than this is left for another one


def draw(problem: WrittenProblem, rng: random.Random) -> tuple[dict[str, int], tuple[Step, ...]]:
    """Returns the value of each variable and the worked steps; raises `Impossible`."""
    for _ in range(TRIES):
        try:
            return _draw_once(problem, rng)
        except Impossible:
            continue
    raise Impossible


def _draw_once(
    problem: WrittenProblem, rng: random.Random
) -> tuple[dict[str, int], tuple[Step, ...]]:
    values: dict[str, int] = {}
    steps: list[Step] = []
    for number, (op, x, y) in enumerate(problem.steps, start=1):
        a, b = _known(x, values), _known(y, values)
        if a is None or b is None:
            a, b = _OPEN[op](rng, a, b, problem.ranges.get(str(x)), problem.ranges.get(str(y)))
            for operand, value in ((x, a), (y, b)):
                if isinstance(operand, str) and values.setdefault(operand, value) != value:
                    raise Impossible  # a variable that stands on both sides
        steps.append(amounts.worked(op, a, b))
        values[f"r{number}"] = steps[-1][3]
    return values, tuple(steps)


def distractor(rng: random.Random, limits: tuple[int, int] | None) -> int:
    """Returns the value of a variable that no step uses."""
    return amounts.amount(rng, 100) if limits is None else rng.randint(*limits)


def _known(operand: Operand, values: dict[str, int]) -> int | None:
    return operand if isinstance(operand, int) else values.get(operand)


# The numbers that a step lacks: (rng, a, b, range of a, range of b) -> (a, b)

Limits = tuple[int, int] | None


def _sum(
    rng: random.Random, a: int | None, b: int | None, of_a: Limits, of_b: Limits
) -> tuple[int, int]:
    if a is None:
        a = _within(rng, of_a) if of_a else amounts.amount(rng)
    if b is None:
        b = _within(rng, of_b) if of_b else amounts.amount(rng)
    return a, b


def _difference(
    rng: random.Random, a: int | None, b: int | None, of_a: Limits, of_b: Limits
) -> tuple[int, int]:
    if a is None and b is not None:
        return (_within(rng, of_a, low=b + 1) if of_a else b + amounts.amount(rng)), b
    if a is None:
        a = _within(rng, of_a) if of_a else amounts.amount(rng)
    return a, (_within(rng, of_b, high=a - 1) if of_b else amounts.below(rng, a))


def _product(
    rng: random.Random, a: int | None, b: int | None, of_a: Limits, of_b: Limits
) -> tuple[int, int]:
    if a is None and b is None and not of_a and not of_b:
        return amounts.factors(rng)
    if a is None and (b is not None or of_a):
        a = _factor(rng, b, of_a)
    if b is None:
        b = _factor(rng, a, of_b)
    return (_factor(rng, b, of_a) if a is None else a), b


def _factor(rng: random.Random, other: int | None, limits: Limits) -> int:
    if limits is None:
        assert other is not None, "a factor without a range is drawn after the other one"
        return amounts.factor(rng, max(other, 1))
    high = limits[1] if other is None else amounts.MAX_VALUE // max(other, 1)
    return _within(rng, limits, high=high)


def _quotient(
    rng: random.Random, a: int | None, b: int | None, of_a: Limits, of_b: Limits
) -> tuple[int, int]:
    if a is not None:
        return a, amounts.divisor(rng, a, *(of_b or ()))
    if b is None:
        b = _within(rng, of_b) if of_b else amounts.any_divisor(rng)
    if of_a is None:
        return b * amounts.factor(rng, b), b
    return b * _within(rng, (max(-(-of_a[0] // b), 1), of_a[1] // b)), b


def _within(rng: random.Random, limits: tuple[int, int], low: int = 0, high: int = 10**6) -> int:
    low, high = max(low, limits[0]), min(high, limits[1])
    if low > high:
        raise Impossible
    return rng.randint(low, high)


_OPEN = {"+": _sum, "-": _difference, "*": _product, "/": _quotient}
