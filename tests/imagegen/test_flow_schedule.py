"""Noise levels against those of diffusers 0.42.1, and every option that is not served."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from jdllm import errors
from jdllm.imagegen import flow_schedule

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images"
MODELS = ("flux", "qwen_image", "z_image")
ATOL = 1e-6  # a few float32 roundings of values up to 1
PIXELS_OF_A_TOKEN = 16
PUBLISHED = {"_class_name": flow_schedule.CLASS_NAME}


def published(model: str) -> dict:
    return json.loads((GOLDENS / model / "pipeline/scheduler/scheduler_config.json").read_text())


def cases(model: str) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """Returns (steps, image tokens, sigmas, timesteps) of every schedule in the file."""
    found = []
    with np.load(GOLDENS / model / "scheduler.npz") as arrays:
        for name in arrays:
            if not name.endswith("/sigmas"):
                continue
            size, steps, _ = name.split("/")
            height, width = map(int, size.split("x"))
            tokens = (height // PIXELS_OF_A_TOKEN) * (width // PIXELS_OF_A_TOKEN)
            timesteps = arrays[name.replace("sigmas", "timesteps")]
            found.append((int(steps[1:]), tokens, arrays[name], timesteps))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_sigmas_are_those_of_diffusers(model):
    schedule = flow_schedule.read(published(model))
    found = cases(model)
    assert len(found) >= 16
    for steps, tokens, sigmas, timesteps in found:
        ours = schedule.sigmas(steps, tokens)
        assert (ours.dtype, ours.shape) == (np.float32, (steps + 1,))
        np.testing.assert_allclose(ours, sigmas, rtol=0, atol=ATOL, err_msg=f"{steps} {tokens}")
        np.testing.assert_allclose(ours[:-1] * 1000, timesteps, rtol=0, atol=ATOL * 1000)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", [0, 7])
def test_a_step_between_two_levels_is_that_of_diffusers(model, step):
    sigmas = flow_schedule.read(published(model)).sigmas(8, 1024)
    with np.load(GOLDENS / model / "scheduler.npz") as arrays:
        after = (
            arrays["step/sample"]
            + (sigmas[step + 1] - sigmas[step]) * (arrays["step/model_output"])
        )
        np.testing.assert_allclose(after, arrays[f"step/out{step}"], rtol=0, atol=5 * ATOL)


def test_linear_time_shift_by_hand():
    schedule = flow_schedule.FlowSchedule(
        use_dynamic_shifting=True,
        time_shift_type="linear",
        base_shift=1.0,
        max_shift=3.0,
        base_image_seq_len=100,
        max_image_seq_len=300,
    )
    # 200 tokens are halfway: mu = 2, and 2 / (2 + (1 / 0.5 - 1)) = 2 / 3.
    np.testing.assert_allclose(schedule.sigmas(2, 200), [1, 2 / 3, 0], atol=ATOL)
    # The line goes on outside its bounds: mu = 4, and 4 / (4 + 1) = 0.8.
    np.testing.assert_allclose(schedule.sigmas(2, 400), [1, 0.8, 0], atol=ATOL)


def test_defaults_shift_nothing():
    schedule = flow_schedule.read(PUBLISHED)
    np.testing.assert_allclose(schedule.sigmas(4, 1024), [1, 0.75, 0.5, 0.25, 0], atol=ATOL)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_levels_fall_from_1_to_0(model, steps):
    sigmas = flow_schedule.read(published(model)).sigmas(steps, 4096)
    assert (sigmas[0], sigmas[-1]) == (1, 0)
    assert np.isfinite(sigmas).all()
    assert (np.diff(sigmas) < 0).all()


def test_shift_terminal_zero_is_none():
    plain, zero = (flow_schedule.read(PUBLISHED | {"shift_terminal": e}) for e in (None, 0.0))
    assert plain == zero


def test_null_means_the_default():
    empty = dict.fromkeys(("shift", "invert_sigmas", "num_train_timesteps", "not_invented_yet"))
    assert flow_schedule.read(PUBLISHED | empty) == flow_schedule.FlowSchedule()


def test_no_steps_is_an_error():
    with pytest.raises(ValueError, match="num_steps=0"):
        flow_schedule.FlowSchedule().sigmas(0, 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "_class_name='DDIMScheduler'"),
        ({"_class_name": None}, "_class_name=None"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas=True"),
        ({"use_exponential_sigmas": True}, "use_exponential_sigmas=True"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas=True"),
        ({"stochastic_sampling": True}, "stochastic_sampling=True"),
        ({"invert_sigmas": True}, "invert_sigmas=True"),
        ({"invert_sigmas": "no"}, "invert_sigmas='no'.*supported: false"),
        ({"num_train_timesteps": 500}, "num_train_timesteps=500"),
        ({"time_shift_type": "cosine"}, "time_shift_type='cosine'.*exponential or linear"),
        ({"time_shift_type": ["linear"]}, "time_shift_type="),
        ({"use_dynamic_shifting": "yes"}, "use_dynamic_shifting='yes'"),
        ({"shift": 0}, "shift=0"),
        ({"shift": float("nan")}, "shift=nan"),
        ({"shift": True}, "shift=True"),
        ({"shift": 10**400}, "shift=.*up to 1e.06"),
        ({"shift_terminal": 1.0}, "shift_terminal=1.0"),
        ({"shift_terminal": -0.1}, "shift_terminal=-0.1"),
        ({"base_image_seq_len": 256.5}, "base_image_seq_len=256.5 .*integer"),
        ({"max_image_seq_len": 256}, "max_image_seq_len=256 must be larger"),
        ({"shfit": 3.0}, "shfit=3.0; did you mean 'shift'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, message):
    with pytest.raises(errors.ConfigError, match=f"scheduler_config.json: .*{message}"):
        flow_schedule.read(PUBLISHED | change)


@pytest.mark.parametrize(
    "change",
    [
        {"base_shift": 999.0, "max_shift": 1000.0},  # math.exp overflows
        {"max_shift": 90.0},  # float32 does, for large images
        {"base_shift": 2.0, "max_shift": 0.5, "time_shift_type": "linear"},  # below 0 for them
    ],
)
def test_a_dynamic_shift_that_no_number_holds_is_refused(change):
    with pytest.raises(errors.ConfigError, match="base_shift=.*max_shift=.*image tokens"):
        flow_schedule.read(PUBLISHED | {"use_dynamic_shifting": True} | change)
