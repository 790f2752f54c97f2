"""Fast-dLLM v2 served: stored generations, other settings against an oracle, and the laws.

The stored forward counts contain the prefill; ours are decode forwards. In both, a forward that
writes a finished block's K,V also gives the first token of the next block.
"""

import functools
import itertools
import json

import numpy as np
import pytest
from support import fast_dllm_oracle
from support.tiny_engine import (
    GOLDEN,
    alone,
    answers,
    assert_nothing_held,
    make_engine,
    random_prompts,
)

from jdllm import errors

FOLDER = GOLDEN.parent / "fast_dllm_v2"
RUNS = json.loads((FOLDER / "meta.json").read_text())["generate"]
BLOCK, SMALL, VOCAB, MASK = 16, 4, 256, 240
PROMPT = np.load(FOLDER / "prompt.npy")[0].tolist()


def make(**options):
    defaults = {
        "model_path": str(FOLDER),
        "dllm_algorithm": "HierarchyBlock,LowConfidence,JointThreshold",
        "dllm_algorithm_config": {"small_block_size": SMALL, "threshold": 0.9},
        "max_running_requests": 4,
        "page_size": 16,
        "chunked_prefill_size": 32,
        "num_continuous_decode_steps": 8,
    }
    return make_engine(**defaults | options)


@pytest.fixture(scope="module")
def engine():
    with make() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_engine():
    with make(
        max_running_requests=1,
        num_continuous_decode_steps=1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
    ) as engine:
        yield engine


@functools.cache
def model():
    return fast_dllm_oracle.Model(FOLDER)


def options_of(run):
    return {"threshold": run["threshold"]}


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_generation_equals_the_reference_token_for_token(number, engine):
    expected = np.load(FOLDER / f"gen{number}_output.npy")[0, len(PROMPT) :].tolist()
    params = {"max_new_tokens": len(expected), "dllm": options_of(RUNS[number])}
    result = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert result["output_ids"] == expected
    assert result["meta_info"]["nfe"] == RUNS[number]["nfe"] - 1  # of the prefill


LENGTHS = (1, 5, 15, 16, 17, 31, 32, 48)
SETTINGS = list(itertools.product((0.02, 0.05, 0.9), (1, 3, 4, 16)))


def test_every_setting_and_prompt_length_gives_the_oracle_s_tokens_and_forwards(engine):
    """Prompts that end on a block's edge, too; thresholds at which steps write several tokens."""
    rng = np.random.default_rng(3)
    prompts, params = [], []
    for i, (threshold, small) in enumerate(SETTINGS * 2):
        prompts.append(rng.integers(0, MASK, LENGTHS[i % len(LENGTHS)]).tolist())
        dllm = {"threshold": threshold, "small_block_size": small}
        params.append({"max_new_tokens": 1 + 9 * (i % 5), "dllm": dllm})
    results = engine.generate(input_ids=prompts, sampling_params=params)
    forwards, written = 0, 0
    for prompt, asked, result in zip(prompts, params, results, strict=True):
        expected, nfe, _ = fast_dllm_oracle.generate(
            model(), prompt, asked["max_new_tokens"], ends=(241,), use_block_cache=False,
            **asked["dllm"],
        )  # fmt: skip
        assert result["output_ids"] == expected, (len(prompt), asked)
        assert result["meta_info"]["nfe"] == nfe, (len(prompt), asked)
        forwards, written = forwards + nfe, written + len(expected)
    assert written > 1.2 * forwards, "steps write several tokens, or thresholds decide nothing"


@pytest.mark.parametrize("block", [0, 1])
def test_a_first_token_that_ends_the_text_costs_no_forward_of_its_own_block(block, engine):
    """It comes from the forward that persists the block before, or the prompt's last one."""
    first = block * BLOCK
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(0, MASK, BLOCK).tolist()
        params = {"max_new_tokens": first + 20, "ignore_eos": True}
        free = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        if free[first] not in free[:first]:
            break
    ends = (free[first],)
    params["stop_token_ids"] = ends
    ended = engine.generate(input_ids=prompt, sampling_params=params)
    expected, nfe, _ = fast_dllm_oracle.generate(
        model(), prompt, first + 20, threshold=0.9, small_block_size=SMALL, use_block_cache=False,
        ends=ends,
    )  # fmt: skip
    assert ended["output_ids"] == free[: first + 1] == expected
    assert ended["meta_info"]["nfe"] == nfe == 1 + block * BLOCK


def params_for(i):
    """Mixed rules, lengths and sampling."""
    options = [
        {"max_new_tokens": 20},
        {"max_new_tokens": 41, "dllm": {"threshold": 0.05}},
        {"max_new_tokens": 9, "temperature": 1.0, "seed": i, "top_p": 0.9},
        {"max_new_tokens": 26, "dllm": {"algorithm": "JointThreshold", "threshold": 0.2}},
        {"max_new_tokens": 33, "dllm": {"algorithm": "LowConfidence", "threshold": 0.1}},
    ]
    return options[i % len(options)]


PROMPTS = [
    *random_prompts(1, 8, longest=60, vocab=MASK),
    PROMPT[:16],
    *([(PROMPT * 2)[:32]] * 2),
    *([(PROMPT * 3)[:48]] * 2),
]
PARAMS = [params_for(i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(plain_engine):
    return answers(alone(plain_engine, PROMPTS, PARAMS))


def test_together_equals_alone_and_hit_equals_miss(engine, expected):
    compiles = engine.stats().jit_compiles_total
    assert engine.flush_cache()
    first = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    again = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    assert answers(first) == expected
    assert answers(again) == expected
    cached = [sum(one["meta_info"]["cached_tokens"] for one in each) for each in (first, again)]
    assert cached[1] > cached[0]
    assert engine.stats().jit_compiles_total == compiles
    assert_nothing_held(engine)


def test_preempted_requests_give_the_text_of_undisturbed_ones(expected):
    with make(max_total_tokens=8 * 16) as small:
        got = small.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        assert small.stats().preemptions_total > 0
        assert_nothing_held(small)
    assert answers(got) == expected


def test_a_prompt_of_whole_blocks_reuses_all_but_its_last_block(engine):
    prompt = np.random.default_rng(9).integers(0, MASK, 3 * BLOCK).tolist()
    params = {"max_new_tokens": 3}
    engine.generate(input_ids=prompt, sampling_params=params)
    hit = engine.generate(input_ids=prompt, sampling_params=params)["meta_info"]
    longer = engine.generate(input_ids=[*prompt, 7], sampling_params=params)["meta_info"]
    assert (hit["cached_tokens"], longer["cached_tokens"]) == (2 * BLOCK, 3 * BLOCK)


def test_what_the_rule_does_not_know_is_refused_by_name(engine):
    for dllm, name in (
        ({"small_block_size": 0}, "small_block_size"),
        ({"small_block_size": 2.5}, "small_block_size"),
        ({"threshold": 1.5}, "threshold"),
        ({"edit_threshold": 0.5}, "edit_threshold"),
        ({"algorithm": "LowConfidence", "small_block_size": 4}, "small_block_size"),
    ):
        with pytest.raises(errors.RequestError, match=name):
            engine.generate(input_ids=[1], sampling_params={"dllm": dllm})
