"""Options at the ends of their ranges: whatever is accepted ends well, with finite numbers."""

import numpy as np
import pytest
from support import canvas_engine
from support.extremes import NUMBERS
from support.tiny_engine import make_engine

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.options.sampling_params import DllmParams, SamplingParams

TOKENS = 8


def accepted_options(algorithm):
    """Yields {name: value} for every accepted number at an end of a range, or near one."""
    for option in algorithm.options:
        if option.type not in ("number", "integer"):
            continue
        distinct = {float(v): v for v in [*NUMBERS, option.low, option.high] if abs(v) < 1e300}
        for value in distinct.values():
            try:
                DllmParams(algorithm=algorithm.name, **{option.name: value})
            except errors.RequestError:
                continue
            yield {option.name: value}


def params(temperature, dllm):
    return SamplingParams(
        max_new_tokens=TOKENS, return_logprob=True, seed=1, temperature=temperature, dllm=dllm
    )


def asks(engine):
    for name in engine._built.algorithms:
        algorithm = lookup.TABLE[name]
        plain = {"algorithm": name}
        if algorithm.option("block_length"):
            plain["block_length"] = TOKENS
        for given in accepted_options(algorithm):
            more = {"alg": "entropy"} if "alg_temp" in given else {}
            if "max_post_edit_steps" in given:
                more = {"edit_threshold": 1.0}  # or edits that oscillate take all of the steps
            yield params(0.5 * ("alg" in more), plain | more | given)
        for temperature in (1e-7, 1e-6, 100.0):
            yield params(temperature, plain)


def answer(engine, params):
    """Returns the answer, or None if the engine refuses the options together by name."""
    try:
        return engine.generate(input_ids=[5, 6, 7], sampling_params=params)
    except errors.RequestError as error:
        assert error.param in ("max_new_tokens", *(f"dllm.{name}" for name in params.dllm.options))
        return None


def check_all_end_well(engine):
    results = [(params, answer(engine, params)) for params in asks(engine)]
    assert sum(result is not None for _, result in results) > len(results) / 2
    for params, result in results:
        if result is None:
            continue
        meta = result["meta_info"]
        assert meta["finish_reason"]["type"] in ("stop", "length"), params
        assert np.isfinite([value for value, _, _ in meta["output_token_logprobs"]]).all(), params


@pytest.mark.campaign
def test_block_rows_end_well(engine):
    check_all_end_well(engine)


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.campaign)])
def test_canvas_rows_end_well(family):
    check_all_end_well(canvas_engine.shared(family))


@pytest.mark.campaign
def test_block_rows_in_16_bits_end_well():
    with make_engine(dtype="float16") as half:
        check_all_end_well(half)
