"""The laws of the engine for models with blocks of 4, with the rules that came with them."""

import pytest
from support.tiny_engine import (
    GOLDEN,
    alone,
    answers,
    assert_nothing_held,
    make_engine,
    random_prompts,
)

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

GOLDENS = GOLDEN.parent
RULES = {
    "sdar": [
        {"algorithm": "SDAR", "threshold": 0.3},
        {"algorithm": "SDAR", "remasking_strategy": "low_confidence_static", "denoising_steps": 2},
        {"algorithm": "SDAR", "remasking_strategy": "entropy_bounded", "eb_threshold": 4.0},
        {"algorithm": "SDAR", "remasking_strategy": "sequential"},
        {"algorithm": "LowConfidence", "threshold": 0.2},
    ],
    "sdar_moe": [
        {"algorithm": "SDAR", "threshold": 0.3},
        {"algorithm": "LowConfidence", "threshold": 0.2},
    ],
    "stable_diffcoder": [
        {"algorithm": "MaskedDiffusion", "threshold": 0.3},
        {"algorithm": "MaskedDiffusion", "selection_policy": "low_confidence"},
        {"algorithm": "MaskedDiffusion", "selection_policy": "leftmost", "max_denoising_steps": 2},
        {"algorithm": "LowConfidence", "threshold": 0.2},
    ],
}


def params_of(family, count):
    rules = RULES[family]
    found = []
    for i in range(count):
        one = {"max_new_tokens": 11 + 7 * (i % 4), "dllm": rules[i % len(rules)]}
        if i % 3 == 2:
            one |= {"temperature": 0.8, "seed": i, "top_k": 20}
        found.append(one)
    return found


def make(family, **options):
    names = dict.fromkeys(rule["algorithm"] for rule in RULES[family])
    defaults = {
        "model_path": str(GOLDENS / family),
        "dllm_algorithm": ",".join(names),
        "dllm_algorithm_config": {"block_size": 4},
        "page_size": 8,
        "max_running_requests": 2,
        "context_length": 96,
    }
    return make_engine(**defaults | options)


@pytest.mark.parametrize(
    "family",
    [
        "sdar",
        pytest.param("sdar_moe", marks=pytest.mark.campaign),
        pytest.param("stable_diffcoder", marks=pytest.mark.campaign),
    ],
)
def test_together_equals_alone_with_few_pages_and_without_overlap(family):
    prompts = random_prompts(5, 8, longest=40, vocab=230)
    params = params_of(family, len(prompts))
    with make(family) as engine:
        compiles = engine.stats().jit_compiles_total
        expected = answers(alone(engine, prompts, params))
        together = engine.generate(input_ids=prompts, sampling_params=params)
        assert answers(together) == expected
        again = engine.generate(input_ids=prompts, sampling_params=params)
        assert answers(again) == expected, "cached prefixes change nothing"
        assert sum(one["meta_info"]["cached_tokens"] for one in again) > 0
        assert engine.stats().jit_compiles_total == compiles
        assert_nothing_held(engine)
    plain = {
        "disable_overlap_schedule": True,
        "num_continuous_decode_steps": 1,
        "disable_radix_cache": True,
        "max_total_tokens": 10 * 8,  # rows are preempted
    }
    with make(family, **plain) as engine:
        together = engine.generate(input_ids=prompts, sampling_params=params)
        assert answers(together) == expected
        assert engine.stats().preemptions_total > 0
        assert_nothing_held(engine)
