"""A stage that goes on in another process has the minutes, and so the rate, that are left of it."""

import types

import numpy as np
import pytest
from support import tiny_scenes, tiny_text

from jdllm.train import clock, config, recipes
from jdllm.train.scenes import evaluate, pool, programs

PEAK, NOW = 1e-3, 5000.0
OPTIONS = {"decay_share": 0.5, "warmup_steps": 1, "learning_rate": PEAK, "max_minutes": 20}


@pytest.fixture
def now(monkeypatch):
    """Returns the time, in a list of one number."""
    seconds = [NOW]
    monkeypatch.setattr(clock.time, "monotonic", lambda: seconds[0])
    return seconds


class Programs:
    """Compiles nothing; a step returns its rate."""

    def __init__(self, *_):
        pass

    def wait_for(self, stage):
        pass

    def step(self, stage, state, batch, rate):
        return state, {"rate": rate}


class Pool:
    """Has no scenes."""

    def __init__(self, *_, **__):
        pass

    def view(self, size):
        return types.SimpleNamespace(arrays={})

    def encode(self, encode):
        pass


@pytest.fixture
def scenes(tmp_path, monkeypatch):
    """Returns a recipe of which only the clock is real."""
    monkeypatch.setattr(programs, "Programs", Programs)
    monkeypatch.setattr(pool, "ScenePool", Pool)
    monkeypatch.setattr(evaluate, "Evaluator", lambda *_: None)
    words = tiny_scenes.arguments(
        tiny_scenes.write_model(tmp_path / "model"), tmp_path,
        **(OPTIONS | {"vae_minutes": 10, "vae_learning_rate": 2 * PEAK, "num_steps": 10**9,
                      "vae_steps": 10**8}),
    )  # fmt: skip
    settings = recipes.load(tiny_scenes.RECIPE, words[words.index("--set") + 1 :])
    return recipes.build(settings, tmp_path)


def state(stage):
    return types.SimpleNamespace(stage=stage, step=70, start_step=50, average={})


def test_the_second_stage_of_scenes(scenes, now):
    # It began after 300 of the run's 1,200 seconds: 600 of its 900 have passed.
    scenes.batches(state("flow"), clock.Passed(run=900, stage=600))
    _, metrics = scenes.step(None, None)
    assert metrics["rate"] == pytest.approx(PEAK * (1 / 3) / 0.5)
    assert scenes.passed() == clock.Passed(run=900, stage=600)
    now[0] += 299
    assert not scenes.is_over(71) and scenes.passed() == clock.Passed(run=1199, stage=899)
    now[0] += 1
    assert scenes.is_over(71)


def test_the_first_stage_of_scenes(scenes, now):
    scenes.batches(state("vae"), clock.Passed(run=500, stage=450))
    _, metrics = scenes.step(None, None)
    assert metrics["rate"] == pytest.approx(2 * PEAK * (1 / 4) / 0.5)
    now[0] += 10
    assert scenes.passed() == clock.Passed(run=510, stage=460)


def test_a_run_of_text_has_one_stage(tmp_path, now, monkeypatch):
    model_path = tiny_text.write_model(tmp_path)
    values = tiny_text.SETTINGS | OPTIONS | {"model_path": str(model_path), "num_steps": 10**9}
    recipe = recipes.build(config.from_mapping(values), tmp_path)
    rates = []
    monkeypatch.setattr(recipe, "_step", lambda state, batch, rate: rates.append(rate))
    recipe.batches(
        types.SimpleNamespace(step=np.int32(70), start_step=0), clock.Passed(run=900, stage=900)
    ).close()
    recipe.step(None, None)
    assert rates == [pytest.approx(PEAK * (1 / 4) / 0.5)]
    now[0] += 300
    assert recipe.is_over(71) and recipe.passed() == clock.Passed(run=1200, stage=1200)
