"""Noise levels against those of diffusers 0.42.1, and every option that is not served."""

from __future__ import annotations

import itertools
import json
import pathlib
import random

import numpy as np
import pytest

from jdllm import errors
from jdllm.pipelines import flow_schedule

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


def test_null_switches_off_and_0_and_1_are_flags():
    names = ("invert_sigmas", "use_dynamic_shifting", "use_beta_sigmas", "not_invented_yet")
    for off in (None, 0):
        flags = dict.fromkeys(names[:3], off) | {names[3]: None}
        assert flow_schedule.read(PUBLISHED | flags) == flow_schedule.FlowSchedule()
    assert flow_schedule.read(PUBLISHED | {"use_dynamic_shifting": 1}).use_dynamic_shifting is True


def of_diffusers(config: dict, steps: int, tokens: int) -> np.ndarray:
    """Returns the levels by diffusers' documentation, in float64; a field that is missing is its
    default, and null and 0 are what Python makes of them."""
    one = DEFAULTS | config
    levels = np.linspace(1, 1 / steps, steps)
    if one["use_dynamic_shifting"]:
        slope = (one["max_shift"] - one["base_shift"]) / (
            one["max_image_seq_len"] - one["base_image_seq_len"]
        )
        mu = slope * tokens + (one["base_shift"] - slope * one["base_image_seq_len"])
        strength = np.exp(mu) if one["time_shift_type"] == "exponential" else np.float64(mu)
        levels = strength / (strength + (1 / levels - 1))
    else:
        shift = np.float64(one["shift"])
        levels = shift * levels / (1 + (shift - 1) * levels)
    if one["shift_terminal"]:
        rest = 1 - levels
        levels = 1 - rest / (rest[-1] / (1 - one["shift_terminal"]))
    return np.append(levels, 0)


DEFAULTS = {
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
    "time_shift_type": "exponential",
}
VALUES = {
    "shift": [None, 0, 0.0, 1, 3.0, 0.25],
    "use_dynamic_shifting": [None, False, True, True, 0, 1],
    "base_shift": [None, 0, 0.0, 0.5, -0.25, 1],
    "max_shift": [None, 0, 0.9, 1.15, 1.4, -0.5],
    "base_image_seq_len": [None, 0, 256, 1024],
    "max_image_seq_len": [None, 0, 256, 8192],
    "shift_terminal": [None, 0, 0.0, 0.02, 0.5],
    "time_shift_type": [None, "exponential", "linear"],
}
MOST_TOKENS = 2048  # up to here float32 holds all of these


def is_served(config: dict) -> bool:
    try:
        flow_schedule.read(PUBLISHED | config).check_images(MOST_TOKENS)
    except errors.ConfigError as error:
        assert flow_schedule.FILE_NAME in str(error)
        return False
    return True


def is_possible(config: dict) -> bool:
    """Says whether diffusers makes levels from 1 down to 0 with it, for images of every size."""
    if (DEFAULTS | config)["time_shift_type"] not in ("exponential", "linear"):
        return False  # an error in its scheduler
    for name in ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"):
        if name in config and config[name] is None:
            return False  # an error in its pipelines, which compute the line anyway
    one = DEFAULTS | config
    if one["max_image_seq_len"] == one["base_image_seq_len"]:
        return False  # likewise: it divides by the difference
    if not one["use_dynamic_shifting"] and one["shift"] is None:
        return False  # None * levels
    sizes = itertools.product((8, 1000), (1, MOST_TOKENS))
    with np.errstate(all="ignore"):
        levels = [of_diffusers(config, steps, tokens) for steps, tokens in sizes]
    return all((np.isfinite(one) & (one >= 0)).all() and (np.diff(one) < 0).all() for one in levels)


def test_every_config_is_served_as_diffusers_does_or_refused_where_it_fails():
    """Also 0, null and missing, of every field."""
    rng = random.Random(3)
    served = 0
    for _ in range(3000):
        chosen = rng.sample(sorted(VALUES), rng.randint(1, len(VALUES)))
        config = {name: rng.choice(VALUES[name]) for name in chosen}
        assert is_served(config) == is_possible(config), config
        if not is_possible(config):
            continue
        served += 1
        schedule = flow_schedule.read(PUBLISHED | config)
        steps, tokens = rng.choice([2, 3, 8, 50]), rng.choice([1, 256, 1024, MOST_TOKENS])
        np.testing.assert_allclose(
            schedule.sigmas(steps, tokens), of_diffusers(config, steps, tokens), rtol=0,
            atol=10 * ATOL, err_msg=f"{config} {steps=} {tokens=}",
        )  # fmt: skip
    assert served > 500


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
        ({"shift": 0}, "shift=0 is not supported without use_dynamic_shifting"),
        ({"shift": None}, "shift=None"),
        ({"shift": -1}, "shift=-1"),
        ({"base_shift": None}, "base_shift=None"),
        ({"num_train_timesteps": None}, "num_train_timesteps=None"),
        ({"time_shift_type": None}, "time_shift_type=None"),
        ({"shift": float("nan")}, "shift=nan"),
        ({"shift": True}, "shift=True"),
        ({"shift": 10**400}, "shift=.*from 0 to 1e.06"),
        ({"shift_terminal": 1.0}, "shift_terminal=1.0"),
        ({"shift_terminal": -0.1}, "shift_terminal=-0.1"),
        ({"base_image_seq_len": 256.5}, "base_image_seq_len=256.5 .*integer"),
        ({"max_image_seq_len": 256}, "max_image_seq_len=256 must differ"),
        ({"shfit": 3.0}, "shfit=3.0; did you mean 'shift'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, message):
    with pytest.raises(errors.ConfigError, match=f"scheduler_config.json: .*{message}"):
        flow_schedule.read(PUBLISHED | change)


@pytest.mark.parametrize(
    ("change", "most_tokens"),
    [
        ({"base_shift": 999.0, "max_shift": 1000.0}, None),  # math.exp overflows
        ({"max_shift": 9.0}, 1 << 15),  # float32 does, for larger images
        ({"max_shift": 9.0, "shift_terminal": 0.1}, 1 << 12),  # larger ones have no level below 1
        ({"base_shift": 0.6, "max_shift": 0.5, "time_shift_type": "linear"}, 1 << 14),
        ({"base_shift": 0, "time_shift_type": "linear"}, None),  # below 0 for small ones
    ],
)
def test_a_dynamic_shift_is_refused_for_sizes_whose_shift_no_number_holds(change, most_tokens):
    schedule = flow_schedule.read(PUBLISHED | {"use_dynamic_shifting": True} | change)
    if most_tokens is not None:
        schedule.check_images(most_tokens)
        levels = schedule.sigmas(50, most_tokens)
        assert np.isfinite(levels).all() and (np.diff(levels) <= 0).all()
    with pytest.raises(errors.ConfigError, match="base_shift=.*max_shift=.*images of") as caught:
        schedule.check_images((most_tokens or 1) * 8)
    assert ("lower max_image_pixels" in str(caught.value)) == (most_tokens is not None)
