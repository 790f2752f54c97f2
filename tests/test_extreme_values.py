"""Every number of a request: refused by name and in few words, or finite on the device."""

import dataclasses

import numpy as np
import pytest
from support.extremes import EVERYTHING, MOST_CHARACTERS

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.options.sampling_params import (
    GREEDY_BELOW,
    LEAST_TEMPERATURE,
    DllmParams,
    SamplingParams,
)

DECLARED = [
    pytest.param(algorithm, option, id=f"{algorithm.name}-{option.name}")
    for algorithm in lookup.TABLE.values()
    for option in algorithm.options
]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "dllm"]


def outcome(make, param):
    """Returns what `make` returns, or None if it refuses the value as it should."""
    try:
        return make()
    except errors.RequestError as error:
        assert error.param == param
        assert len(str(error)) <= MOST_CHARACTERS and "\n" not in str(error)
        return None


@pytest.mark.parametrize(("algorithm", "option"), DECLARED)
def test_an_option_is_refused_or_is_finite_and_nonzero_in_32_bits(algorithm, option):
    taken = []
    bounds = [option.low, option.high] if option.type in ("number", "integer") else []
    for value in [*EVERYTHING, *bounds, *option.words]:
        dllm = outcome(
            lambda value=value: DllmParams(algorithm=algorithm.name, **{option.name: value}),
            f"dllm.{option.name}",
        )
        if dllm is None or value is None:
            continue
        taken.append(value)
        arrays = lookup.padding(algorithm.kind, 1)
        with np.errstate(all="raise", under="ignore"):
            lookup.fill(arrays, 0, algorithm.name, dllm.options, row_length=64)
        assert np.isfinite(arrays[option.name][0])
        if option.default is None and option.type == "number":
            assert arrays[option.name][0] > 0, "0 would mean that the option is not set"
    assert taken and all(bound in taken for bound in bounds)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_refused_or_fits_into_its_array(name):
    field = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}.get(name, name)
    for value in EVERYTHING:
        params = outcome(lambda value=value: SamplingParams.from_mapping({name: value}), field)
        if params is None:
            continue
        found = getattr(params, field)
        if isinstance(found, int | float) and name != "seed":
            assert abs(found) < 2**31 and np.isfinite(np.float32(found))


def test_a_temperature_is_zero_or_can_divide_states_of_16_bits():
    for value in (0, 5e-324, GREEDY_BELOW / 2):
        assert SamplingParams(temperature=value).temperature == 0
    for value in (GREEDY_BELOW, 1e-3, LEAST_TEMPERATURE):
        assert SamplingParams(temperature=value).temperature == LEAST_TEMPERATURE
    assert SamplingParams(temperature=0.02).temperature == 0.02


@pytest.mark.parametrize("name", ["x" * 100_000, "", "dllm", "a\nb"])
def test_unknown_names_are_quoted_in_one_line(name):
    for make in (
        lambda: SamplingParams.from_mapping({name: 1}),
        lambda: DllmParams.from_mapping({name: 1}),
        lambda: DllmParams(algorithm=name),
    ):
        with pytest.raises(errors.RequestError) as raised:
            make()
        assert len(str(raised.value)) <= 3 * MOST_CHARACTERS and "\n" not in str(raised.value)
        assert len(raised.value.param) <= 2 * errors.QUOTED_CHARACTERS


def test_long_and_deep_values_are_quoted_in_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, 10**5000, list(range(10**6)), {"k" * 10**6: 10**5000}):
        assert len(errors.quote(value)) <= errors.QUOTED_CHARACTERS
