"""The clock of a stage: what has passed of it, and its learning rate."""

import time

import pytest

from jdllm.train import clock


def made(**changes):
    options = {"peak": 3e-3, "warmup_steps": 10, "decay_share": 0.2, "first": 0, "last": 100}
    return clock.Clock(**(options | changes))


def test_steps_end_a_stage_without_a_limit_of_time():
    assert [made(first=0, last=10).share(n) for n in (0, 5, 10)] == [0, 0.5, 1]
    assert [made(first=10, last=30).share(n) for n in (10, 20, 30)] == [0, 0.5, 1]


def test_the_rate_warms_up_holds_and_falls_to_zero():
    rates = [made().rate(number) for number in (0, 9, 50, 90, 100)]
    assert rates == pytest.approx([3e-4, 3e-3, 3e-3, 1.5e-3, 0.0])


def test_the_rate_falls_to_zero_when_time_ends_a_stage(monkeypatch):
    now = [160.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    options = {"peak": 1e-3, "warmup_steps": 4, "decay_share": 0.5, "first": 50, "last": 10_000}
    slow = made(**options, seconds=180.0, began=160.0)
    rates = []
    for number, seconds in ((50, 0), (51, 0), (60, 80), (70, 135), (80, 180)):
        now[0] = 160.0 + seconds
        rates.append(slow.rate(number))
    assert rates == pytest.approx([2.5e-4, 5e-4, 1e-3, 5e-4, 0])
    assert slow.share(80) == pytest.approx(1)


def test_a_stage_whose_time_is_over_at_its_start_takes_no_step():
    assert made(seconds=-1.0).share(0) == 1
