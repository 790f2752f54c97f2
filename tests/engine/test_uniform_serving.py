"""DiffusionGemma served: requests equal loops without an engine, and the laws hold."""

import jax
import numpy as np
import pytest
from support.gemma_engine import RULES, make, params_of
from support.gemma_oracle import Reference
from support.gemma_rows import VOCAB, write_tame_model
from support.tiny_engine import alone, answers, assert_nothing_held, random_prompts

from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tame_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    with make(model) as one:
        yield one


PROMPTS = random_prompts(5, 10, longest=40, vocab=VOCAB)
PARAMS = params_of(len(PROMPTS))


@pytest.fixture(scope="module")
def expected(engine):
    """What the requests write one by one."""
    return alone(engine, PROMPTS, PARAMS)


def test_requests_equal_loops_without_an_engine(model, expected):
    with jax.default_matmul_precision("highest"):
        reference, seen = Reference(model), set()
        for prompt, params, result in zip(PROMPTS, PARAMS, expected):
            tokens, forwards, logprobs, steps = reference.write(
                prompt,
                params["dllm"],
                seed=params["seed"],
                max_new_tokens=params["max_new_tokens"],
                ends=() if params["ignore_eos"] else (1,),
                is_greedy=params.get("temperature") == 0,
            )
            meta = result["meta_info"]
            assert result["output_ids"] == tokens
            assert meta["nfe"] == forwards
            assert meta["dllm"]["blocks"] == -(-len(tokens) // 8)
            mine = [one[0] for one in meta["output_token_logprobs"]]
            np.testing.assert_allclose(mine, logprobs, atol=1e-3)
            assert meta["step_map"] == steps
            seen.add((forwards, len(tokens)))
        assert len(seen) > 5, "canvases end after different numbers of steps"


def test_together_equals_alone_and_cached_prefixes_change_nothing(engine, expected):
    compiles = engine.stats().jit_compiles_total
    for _ in range(2):
        together = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        assert answers(together) == answers(expected)
    assert sum(one["meta_info"]["cached_tokens"] for one in together) > 0
    assert engine.stats().jit_compiles_total == compiles
    assert_nothing_held(engine)


def test_a_whole_prompt_in_the_cache_needs_no_encode_launch(engine, expected):
    prompt = PROMPTS[0][:1] * 16  # two pages
    first, again = (engine.generate(input_ids=prompt, sampling_params=PARAMS[0]) for _ in range(2))
    assert answers([first]) == answers([again])
    assert again["meta_info"]["cached_tokens"] == 16
    assert_nothing_held(engine)


def test_rows_that_are_preempted_write_what_they_would_have_written(engine):
    prompts = [prompt[:6] for prompt in PROMPTS[:4]]
    params = [one | {"max_new_tokens": 60, "ignore_eos": True} for one in PARAMS[:4]]
    expected = alone(engine, prompts, params)
    before = engine.stats().preemptions_total
    together = engine.generate(input_ids=prompts, sampling_params=params)
    assert answers(together) == answers(expected)
    assert engine.stats().preemptions_total > before
    assert_nothing_held(engine)


def test_without_overlap_and_with_launches_of_one_step(engine, expected, monkeypatch):
    core = engine._built.core
    monkeypatch.setattr(core, "_overlaps", False)
    monkeypatch.setattr(core.scheduler.rows, "_decode_steps", 1)
    core.scheduler.live.flush()  # no request runs; every prompt is encoded again
    together = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    assert answers(together) == answers(expected)
    assert_nothing_held(engine)


def test_aborted_requests_leave_nothing(engine):
    stream = engine.generate(
        input_ids=PROMPTS[1], sampling_params=PARAMS[0] | {"max_new_tokens": 40}, stream=True
    )
    next(stream)
    stream.close()
    engine.generate(input_ids=[3], sampling_params=PARAMS[0] | {"max_new_tokens": 1})
    assert_nothing_held(engine)


def test_without_a_seed_choices_differ_and_the_last_position_of_the_context_is_used(engine):
    ask = {"max_new_tokens": 95, "ignore_eos": True, "dllm": {"max_denoising_steps": 1}}
    one, two = engine.generate(input_ids=[5], sampling_params=ask | {"n": 2})
    assert len(one["output_ids"]) == len(two["output_ids"]) == 95
    assert one["output_ids"] != two["output_ids"]
    assert one["meta_info"]["nfe"] == 12


@pytest.mark.parametrize(
    "options, param",
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"allowed_token_ids": [3, 4]}, "allowed_token_ids"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
        ({"return_logprob": True, "top_logprobs": 2}, "top_logprobs"),
        ({"dllm": {"stream_mode": "denoise"}}, "dllm.stream_mode"),
        ({"dllm": {"threshold": 0.9}}, "dllm.threshold"),
        ({"dllm": {"t_min": 0}}, "dllm.t_min"),
        ({"dllm": {"max_denoising_steps": 0}}, "dllm.max_denoising_steps"),
        ({"dllm": {"algorithm": "LowConfidence"}}, "dllm.algorithm"),
        ({"regex": "a*"}, "regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_without_meaning_are_refused_by_name(engine, options, param):
    with pytest.raises(errors.RequestError) as refused:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 4} | options)
    assert refused.value.param == param
    for name in ("temperature", "top_p"):
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1, name: 1})


def test_lm_evals_usual_options_are_served(engine):
    ask = {"temperature": 0, "seed": 1234, "max_new_tokens": 6, "dllm": RULES[0]}
    first, again = (engine.generate(input_ids=[9, 8, 7], sampling_params=ask) for _ in range(2))
    assert first["output_ids"] == again["output_ids"]


def test_other_algorithms_are_refused_by_name(model):
    with pytest.raises(errors.ConfigError, match="cannot run dllm_algorithm 'LowConfidence'"):
        make(model, dllm_algorithm="LowConfidence")
