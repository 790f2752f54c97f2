"""Draws of the numbers of stories: small ones often, results of up to 1000.

Quantities, factors and divisors have sizes as people write them: many small ones, some round
ones, few large ones. A draw that does not fit raises `Impossible`, and the caller draws again.
"""

from __future__ import annotations

import random

Step = tuple[str, int, int, int]  # op, a, b, result

MAX_VALUE = 1000
MAX_DIVISOR = 25


class Impossible(Exception):
    """Says that the drawn numbers do not fit the story; the caller draws others."""


def worked(op: str, a: int, b: int) -> Step:
    """Returns the step with its result, which must be exact and between 1 and `MAX_VALUE`."""
    if op == "/":
        if b == 0 or a % b:
            raise Impossible
        result = a // b
    else:
        result = a + b if op == "+" else a - b if op == "-" else a * b
    if not 0 < result <= MAX_VALUE:
        raise Impossible
    return op, a, b, result


def line(step: Step) -> str:
    """Returns the line of a worked answer that shows a step."""
    op, a, b, result = step
    return f"{a} {op} {b} = <<{a}{op}{b}={result}>>{result}"


def amount(rng: random.Random, most: int = MAX_VALUE) -> int:
    """Draws a quantity from 2 to `most`: small ones often, up to 600."""
    if most < 2:
        raise Impossible
    for _ in range(4):
        draw = rng.random()
        if draw < 0.35:
            value = 2 + int(19 * rng.random())
        elif draw < 0.75:
            value = 10 + int(91 * rng.random())
        elif draw < 0.88:
            value = 50 + int(551 * rng.random())
        else:
            value = 5 * (2 + int(79 * rng.random())) if draw < 0.94 else 10 * rng.randint(1, 60)
        if value <= most:
            return value
    return rng.randint(2, most)


def below(rng: random.Random, value: int) -> int:
    """Draws a quantity smaller than `value`."""
    if value < 3:
        raise Impossible
    draw = rng.random()
    if draw < 0.25:
        return rng.randint(2, min(12, value - 1))
    if draw < 0.35 and value > 10:
        return 5 * rng.randint(1, (value - 1) // 5)
    return rng.randint(2, value - 1)


def factors(rng: random.Random) -> tuple[int, int]:
    """Draws the two numbers of a multiplication."""
    draw = rng.random()
    if draw < 0.8:
        a, b = rng.randint(2, 25), rng.randint(2, 12)
    elif draw < 0.9:
        a = 10 * rng.randint(2, 30)
        b = rng.randint(2, min(12, MAX_VALUE // a))
    else:
        a, b = rng.randint(26, 99), rng.randint(2, 9)
    return (a, b) if rng.random() < 0.5 else (b, a)


def factor(rng: random.Random, other: int) -> int:
    """Draws a number whose product with `other` is at most `MAX_VALUE`."""
    most = MAX_VALUE // other
    if most < 2:
        raise Impossible
    if other <= 12 and rng.random() < 0.3:
        return amount(rng, most)
    return rng.randint(2, min(25 if other <= 12 else 12, most))


def any_divisor(rng: random.Random) -> int:
    """Draws the divisor of a division whose dividend is still open."""
    return rng.randint(2, 12) if rng.random() < 0.88 else rng.randint(13, MAX_DIVISOR)


def divisor(rng: random.Random, value: int, low: int = 2, high: int = MAX_DIVISOR) -> int:
    """Draws an exact divisor of `value`, mostly one of up to 12, with a result of 2 or more."""
    fit = [d for d in range(low, min(high, value // 2) + 1) if value % d == 0]
    if not fit:
        raise Impossible
    small = [d for d in fit if d <= 12]
    return rng.choice(small if small and rng.random() < 0.9 else fit)
