"""When requests are sent, and how many at a time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from jdllm import errors
from jdllm.bench import prompts, stats, traffic

PROMPTS = [prompts.Prompt(content=[i], output_len=1) for i in range(12)]


def test_arrivals_are_a_poisson_process():
    assert traffic.arrivals_s(3, float("inf"), 0) == [0.0, 0.0, 0.0]
    found = traffic.arrivals_s(5000, 20.0, 0)
    gaps = np.diff(found)
    assert found[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # exponential: as large as the mean
    assert traffic.arrivals_s(5000, 20.0, 0) == found
    assert traffic.arrivals_s(1, 20.0, 0) == [0.0]


@pytest.mark.parametrize("rate", [1e-30, 5e-324])
def test_arrivals_beyond_a_year_are_refused(rate):
    with pytest.raises(errors.ConfigError, match="raise --request-rate"):
        traffic.arrivals_s(3, rate, 0)


def send(at_s, answer=lambda: time.sleep(0.02), **options):
    lock, state = threading.Lock(), {"open": 0, "most": 0}

    def ask(prompt):
        with lock:
            state["open"] += 1
            state["most"] = max(state["most"], state["open"])
        start_s = time.perf_counter()
        answer()
        with lock:
            state["open"] -= 1
        return stats.Record(
            start_s=start_s, end_s=time.perf_counter(), prompt_tokens=prompt.content[0]
        )

    records, duration_s = traffic.send(ask, PROMPTS, at_s=at_s, show_progress=False, **options)
    assert [record.prompt_tokens for record in records] == list(range(12))
    return records, duration_s, state["most"]


def test_never_more_at_a_time_than_allowed():
    _, duration_s, most = send([0.0] * 12, max_concurrency=3)
    assert most == 3
    assert duration_s >= 4 * 0.02
    everyone = threading.Barrier(12)  # who waits at it is answered when all twelve do
    _, _, most = send([0.0] * 12, answer=lambda: everyone.wait(timeout=60))
    assert most == 12


def test_requests_are_sent_when_they_are_due():
    at_s = [0.03 * i for i in range(12)]
    began_s = time.perf_counter()
    records, _, _ = send(at_s)
    sent = [record.start_s - began_s for record in records]
    assert all(late >= due for late, due in zip(sent, at_s, strict=True))


def test_a_fault_of_ours_is_raised():
    def ask(prompt):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        traffic.send(ask, PROMPTS, at_s=[0.0] * 12, show_progress=False)
