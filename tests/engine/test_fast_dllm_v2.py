"""Fast-dLLM v2 served: stored generations, other settings against an oracle, and the laws.

The stored forward counts contain the prefill; ours are decode forwards. In both, a forward that
writes a finished block's K,V also gives the first token of the next block.
"""

import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
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

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

FOLDER = GOLDEN.parent / "fast_dllm_v2"
RUNS = json.loads((FOLDER / "meta.json").read_text())["generate"]
BLOCK, SMALL, MASK = 16, 4, 240
PROMPT = np.load(FOLDER / "prompt.npy")[0].tolist()


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    """The folder of a model whose attention matters more, so that stale K,V change its tokens."""
    folder = tmp_path_factory.mktemp("sharp")
    tensors = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    for name in tensors:
        scale = 4 if "q_proj" in name else 3 if "o_proj" in name else 1
        tensors[name] = tensors[name] * np.float32(scale)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    shutil.copy(FOLDER / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def oracle(sharp):
    return functools.partial(fast_dllm_oracle.generate, fast_dllm_oracle.Model(sharp), ends=(241,))


def make(folder, **options):
    defaults = {
        "model_path": str(folder),
        "dllm_algorithm": "HierarchyBlock,LowConfidence,JointThreshold",
        "dllm_algorithm_config": {"small_block_size": SMALL, "threshold": 0.9},
        "max_running_requests": 2,
        "page_size": 16,
        "num_continuous_decode_steps": 8,
    }
    return make_engine(**defaults | options)


@pytest.fixture(scope="module")
def engine(sharp):
    with make(sharp) as engine:
        yield engine


@pytest.fixture(scope="module")
def golden_engine():
    with make(FOLDER, max_running_requests=1, dllm_algorithm="HierarchyBlock") as engine:
        yield engine


def options_of(run):
    return {
        "threshold": run["threshold"],
        "use_block_cache": run.get("use_block_cache", False),
    }


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_generation_equals_the_reference_token_for_token(number, golden_engine):
    expected = np.load(FOLDER / f"gen{number}_output.npy")[0, len(PROMPT) :].tolist()
    params = {"max_new_tokens": len(expected), "dllm": options_of(RUNS[number])}
    result = golden_engine.generate(input_ids=PROMPT, sampling_params=params)
    assert result["output_ids"] == expected
    assert result["meta_info"]["nfe"] == RUNS[number]["nfe"] - 1  # of the prefill


def test_the_cache_leaves_out_what_it_need_not_compute(golden_engine):
    """A step of one row computes the parts of 8 positions that its sub-block touches."""
    settings = {"threshold": 0.4, "use_block_cache": True}
    params = {"max_new_tokens": 44, "dllm": settings}
    golden_engine.generate(input_ids=PROMPT, sampling_params=params)  # the prompt is cached
    before = golden_engine._built.core.counters.computed_positions
    result = golden_engine.generate(input_ids=PROMPT, sampling_params=params)
    computed = golden_engine._built.core.counters.computed_positions - before
    _, nfe, of_parts = fast_dllm_oracle.generate(
        fast_dllm_oracle.Model(FOLDER), PROMPT, 44, small_block_size=SMALL, **settings
    )
    assert result["meta_info"]["nfe"] == nfe
    assert of_parts > nfe / 2
    assert computed == (nfe - of_parts) * BLOCK + of_parts * 8


LENGTHS = (1, 5, 15, 16, 17, 31, 32, 48)
SETTINGS = list(itertools.product((0.02, 0.05, 0.9), (1, 3, 4, 16)))


@pytest.mark.parametrize("is_cached", [False, True], ids=["whole", "cached"])
def test_every_setting_and_prompt_length_gives_the_oracle_s_tokens_and_forwards(
    is_cached, engine, oracle
):
    """Prompts that end on a block's edge, too; thresholds at which steps write several tokens."""
    rng = np.random.default_rng(3)
    prompts, params = [], []
    for i, (threshold, small) in enumerate(SETTINGS * 2):
        prompts.append(rng.integers(0, MASK, LENGTHS[i % len(LENGTHS)]).tolist())
        dllm = {"threshold": threshold, "small_block_size": small, "use_block_cache": is_cached}
        params.append({"max_new_tokens": 1 + 9 * (i % 5), "dllm": dllm})
    results = engine.generate(input_ids=prompts, sampling_params=params)
    forwards, of_parts, written, changed = 0, 0, 0, 0
    for prompt, asked, result in zip(prompts, params, results, strict=True):
        settings = asked["dllm"]
        expected, nfe, parts = oracle(prompt, asked["max_new_tokens"], **settings)
        assert result["output_ids"] == expected, (len(prompt), asked)
        assert result["meta_info"]["nfe"] == nfe, (len(prompt), asked)
        forwards, of_parts, written = forwards + nfe, of_parts + parts, written + len(expected)
        if is_cached:
            whole = settings | {"use_block_cache": False}
            changed += oracle(prompt, asked["max_new_tokens"], **whole)[0] != expected
    assert written > 1.2 * forwards, "steps write several tokens, or thresholds decide nothing"
    assert (of_parts > 0.2 * forwards) == is_cached
    assert (changed > 0) == is_cached, "the cache is an approximation, or it is not used"


@pytest.mark.parametrize("block", [0, 1])
def test_a_first_token_that_ends_the_text_costs_no_forward_of_its_own_block(block, engine, oracle):
    """It comes from the forward that persists the block before, or the prompt's last one."""
    first = block * BLOCK
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(0, MASK, BLOCK).tolist()
        params = {"max_new_tokens": first + 20, "ignore_eos": True, "dllm": {"threshold": 1.0}}
        free = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        if free[first] not in free[:first]:
            break
    ends = (free[first],)
    params["stop_token_ids"] = ends
    ended = engine.generate(input_ids=prompt, sampling_params=params)
    settings = {"threshold": 1.0, "small_block_size": SMALL, "use_block_cache": False}
    expected, nfe, _ = oracle(prompt, first + 20, ends=ends, **settings)
    assert ended["output_ids"] == free[: first + 1] == expected
    assert ended["meta_info"]["nfe"] == nfe == 1 + block * BLOCK


def params_for(i):
    """Mixed rules, lengths and sampling."""
    options = [
        {"max_new_tokens": 20},
        {"max_new_tokens": 41, "dllm": {"threshold": 0.05}},
        {"max_new_tokens": 9, "temperature": 1.0, "seed": i, "top_p": 0.9},
        {"max_new_tokens": 26, "dllm": {"algorithm": "JointThreshold", "threshold": 0.2}},
        {"max_new_tokens": 37, "dllm": {"threshold": 0.1, "use_block_cache": True}},
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
def expected(engine):
    assert engine.flush_cache()
    return answers(alone(engine, PROMPTS, PARAMS))


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


PLAIN = {
    "disable_overlap_schedule": True,
    "num_continuous_decode_steps": 1,
    "disable_radix_cache": True,
}


@pytest.mark.parametrize(
    "options", [PLAIN, pytest.param({}, marks=pytest.mark.campaign)], ids=["plain", "overlap"]
)
def test_preempted_requests_give_the_text_of_undisturbed_ones(options, expected, sharp):
    with make(sharp, max_total_tokens=7 * 16, **options) as small:
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


@pytest.mark.campaign
@pytest.mark.parametrize("is_cached", [False, True], ids=["whole", "cached"])
def test_lists_and_shown_steps_are_those_of_the_step_that_wrote_the_token(is_cached, sharp):
    prompt, dllm = PROMPT[:BLOCK], {"threshold": 0.05, "use_block_cache": is_cached}
    asked = {"max_new_tokens": 40, "ignore_eos": True, "dllm": dllm}
    lists = {"return_logprob": True, "top_logprobs": 3, "return_step_map": True}
    shows = {"dllm": dllm | {"stream_mode": "denoise"}}
    with make(sharp, with_logits=True, max_running_requests=1) as engine:
        plain = engine.generate(input_ids=prompt, sampling_params=asked)
        listed = engine.generate(input_ids=prompt, sampling_params=asked | lists)
        events = engine.generate(input_ids=prompt, sampling_params=asked | shows, stream=True)
        frames = [frame for event in events for frame in event.get("frames", ())]
    ids, meta = listed["output_ids"], listed["meta_info"]
    assert ids == plain["output_ids"] and meta["nfe"] == plain["meta_info"]["nfe"]
    # The first token of each block comes from the last position before it.
    model = fast_dllm_oracle.Model(sharp)
    for start in (0, BLOCK, 2 * BLOCK):
        logits, _ = model.forward([*prompt, *ids[:start]], 0, model.no_kv())
        logprobs = logits[-1] - np.log(np.sum(np.exp(logits[-1])))
        best = [i for i in np.argsort(-logprobs) if i != MASK][:3]
        assert ids[start] == best[0] and meta["step_map"][start] == 1
        assert meta["output_token_logprobs"][start][0] == pytest.approx(logprobs[best[0]], abs=1e-4)
        found = meta["output_top_logprobs"][start]
        assert [i for _, i, _ in found] == best
        np.testing.assert_allclose([p for p, _, _ in found], logprobs[best], atol=1e-4)
    steps, seen = meta["step_map"], set()
    for frame in frames:
        for i, token in enumerate(frame["token_ids"], frame["start"]):
            assert token == (ids[i] if steps[i] <= frame["step"] else None)
        seen.add((frame["start"], frame["step"]))
    assert len(seen) == len(frames) == meta["nfe"]
