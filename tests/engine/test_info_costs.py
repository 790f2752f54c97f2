"""What an engine tells of itself costs the same, however much it has compiled or served."""

from __future__ import annotations

import random

import jax
import pytest
from support import golden_images, image_engine, waiting, work

from jdllm.engine import stats

SIZES = ((64, 96), (96, 64))  # compiled at their first use
STEPS = {"num_inference_steps": 2, "use_tqdm": False}
INFORMATION = ("stats", "server_info", "model_info", "stats_per_replica", "heartbeat_age_s")


@pytest.fixture
def analyses(monkeypatch):
    """The programs that XLA has been asked about."""
    seen, ask = [], jax.stages.Compiled.memory_analysis

    def counted(self):
        seen.append(self)
        return ask(self)

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", counted)
    return seen


def costs(engine):
    """Returns the bytecodes of each question, asked a second time."""
    asked = {name: getattr(engine, name) for name in INFORMATION}
    for ask in asked.values():
        ask()
    return {name: work.bytecodes(ask) for name, ask in asked.items()}


def test_a_program_is_analysed_when_it_is_made_and_never_when_somebody_asks(analyses):
    engine = image_engine.shared()
    engine.generate(golden_images.PROMPTS[1], **STEPS)  # now no program of the start is missing
    waiting.wait_until(lambda: not engine.stats().num_waiting_compiles)
    analyses.clear()
    before, compiled = costs(engine), engine.stats().first_use_compiles_total
    assert not analyses
    for height, width in SIZES:
        engine.generate(golden_images.PROMPTS[1], height=height, width=width, **STEPS)
    waiting.wait_until(lambda: not engine.stats().num_waiting_compiles)
    made = engine.stats().first_use_compiles_total - compiled
    assert made > 2 and len(analyses) == made
    assert costs(engine) == before and len(analyses) == made
    programs = engine._built.runner.compiled.values()
    memory = [one.memory_analysis() for one in programs]
    most = max(
        one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
        for one in memory
    )
    assert engine.stats().launch_memory_usage_gb == most / 1e9


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_the_throughput_is_that_of_the_last_seconds():
    draw, clock, window_s = random.Random(7), Clock(), 5.0
    rate, events = stats.Throughput(window_s, now=clock), []
    bin_s = window_s / stats.THROUGHPUT_BINS
    clock.now_s += window_s
    for _ in range(3000):
        clock.now_s += draw.expovariate(draw.choice((500.0, 500.0, 20.0)))
        events.append((clock.now_s, draw.randint(1, 32)))
        rate.add(events[-1][1])
        if draw.random() < 0.02:
            clock.now_s += draw.choice((0.3, window_s + 1))
        least, most = (
            sum(tokens for at, tokens in events if at > clock.now_s - length_s)
            for length_s in (window_s - bin_s, window_s)
        )
        assert least / window_s - 1e-6 <= rate.per_second() <= most / (window_s - bin_s) + 1e-6


def test_the_throughput_costs_the_same_after_any_number_of_launches():
    costs = []
    for launches_per_second in (20, 2000):
        clock = Clock()
        rate = stats.Throughput(5.0, now=clock)
        for _ in range(10 * launches_per_second):
            clock.now_s += 1 / launches_per_second
            rate.add(1)
        assert rate.per_second() == pytest.approx(launches_per_second, rel=0.03)
        costs.append(work.bytecodes(rate.per_second))
    assert costs[0] == costs[1]
