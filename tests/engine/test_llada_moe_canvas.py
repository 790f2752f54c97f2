"""Rows of a full-attention model with experts: tokens of a numpy sampler, together as alone."""

import numpy as np
import pytest
from support import canvas_engine, llada_moe
from support.tiny_engine import assert_nothing_held

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

BLOCK = 8


@pytest.fixture(scope="module")
def tensors():
    return llada_moe.random_tensors(3)


@pytest.fixture(scope="module")
def engine(tensors, tmp_path_factory):
    directory = llada_moe.write(tmp_path_factory.mktemp("llada_moe"), tensors)
    with canvas_engine.make(
        "llada",
        model_path=str(directory),
        dllm_algorithm="LLaDA",
        dllm_algorithm_config={"block_length": BLOCK},
        max_running_requests=2,
    ) as engine:
        yield engine


def test_tokens_are_those_of_the_numpy_sampler_alone_and_together(engine, tensors):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llada_moe.MASK, n).tolist() for n in (5, 12, 9)]
    params = {"max_new_tokens": 2 * BLOCK, "ignore_eos": True}
    compiles = engine.stats().jit_compiles_total
    alone = [engine.generate(input_ids=one, sampling_params=params) for one in prompts]
    together = engine.generate(input_ids=prompts, sampling_params=params)
    for prompt, one, among in zip(prompts, alone, together, strict=True):
        expected = llada_moe.generate(prompt, 2 * BLOCK, BLOCK, tensors)
        assert one["output_ids"] == among["output_ids"] == expected
        assert one["meta_info"]["nfe"] == 2 * BLOCK
    assert engine.stats().jit_compiles_total == compiles
    assert_nothing_held(engine)
