"""What is told about each output token on request: its step and its log-probability."""

import jax
import numpy as np
import pytest
from support.tiny_engine import BLOCK, GOLDEN, make_engine

import jdllm
from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

ASK = {"return_logprob": True, "return_step_map": True, "ignore_eos": True}


def generate(engine, prompt, **params):
    return engine.generate(input_ids=prompt, sampling_params=ASK | params)


def test_the_step_map_replays_the_decoding_and_logprobs_are_the_models(engine):
    """Replayed step by step on whole-sequence logits: an oracle without pages, cache or loop."""
    prompt = [7, 9, 11]
    result = generate(engine, prompt, max_new_tokens=2 * BLOCK - 3, dllm={"threshold": 0.9})
    info = result["meta_info"]
    ids, steps = result["output_ids"], info["step_map"]
    logprobs = [entry[0] for entry in info["output_token_logprobs"]]
    assert [entry[1] for entry in info["output_token_logprobs"]] == ids
    assert len(ids) == len(steps) == len(logprobs) == 2 * BLOCK - 3
    with jax.default_matmul_precision("highest"):
        model = jdllm.load_model(GOLDEN, dtype="float32", block_size=BLOCK)
        mask_id = model.spec.diffusion.mask_token_id
        tokens, step_of = np.array(prompt + ids), np.array([0] * len(prompt) + steps)
        for start in (0, BLOCK):
            block = slice(start, start + BLOCK)
            for step in range(1, step_of[block].max() + 1):
                seen = tokens[: start + BLOCK].copy()
                seen[block][step_of[block] >= step] = mask_id
                logits = np.array(model.logits(seen[None])[0], np.float64)[block]
                own = np.take_along_axis(logits, tokens[block][:, None], 1)[:, 0]
                expected = own - np.log(np.exp(logits).sum(1))
                written = np.flatnonzero(step_of[block] == step)
                assert written.size, "a step that wrote nothing"
                for place in written:
                    got = logprobs[start + place - len(prompt)]
                    np.testing.assert_allclose(got, expected[place], atol=2e-4)


def test_maps_do_not_depend_on_launches_and_come_only_when_asked_for(engine, plain_engine):
    prompt, params = [4] * 13, {"max_new_tokens": 30, "dllm": {"algorithm": "JointThreshold"}}
    fused, plain = (generate(e, prompt, **params)["meta_info"] for e in (engine, plain_engine))
    assert fused["step_map"] == plain["step_map"] and len(fused["step_map"]) == 30
    np.testing.assert_allclose(
        [entry[0] for entry in fused["output_token_logprobs"]],
        [entry[0] for entry in plain["output_token_logprobs"]],
        atol=1e-4,
    )
    silent = engine.generate(input_ids=prompt, sampling_params=params)["meta_info"]
    assert "step_map" not in silent and "output_token_logprobs" not in silent


def test_a_drawn_token_has_its_own_logprob_not_the_bests():
    with make_engine(max_running_requests=1) as engine:
        params = {"max_new_tokens": 40, "temperature": 3.0, "seed": 1, "dllm": {"threshold": 1.0}}
        drawn = generate(engine, [5] * 9, **params)["meta_info"]["output_token_logprobs"]
        greedy = generate(engine, [5] * 9, max_new_tokens=40)["meta_info"]["output_token_logprobs"]
    mean = [np.mean([entry[0] for entry in some]) for some in (drawn, greedy)]
    assert mean[0] < mean[1] - 1 and max(entry[0] for entry in drawn) <= 0


def test_wrong_values_are_refused(engine):
    with pytest.raises(errors.RequestError, match="return_step_map must be true or false"):
        engine.generate(input_ids=[1], sampling_params={"return_step_map": 1})
