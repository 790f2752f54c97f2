"""Block rows with penalties, biases, bans and lists of the best tokens, against a slow oracle."""

import functools

import numpy as np
import pytest
from support import logit_oracle
from support.tiny_engine import BLOCK, GOLDEN, VOCAB, assert_nothing_held, make_engine

import jdllm
from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

LOW = {"algorithm": "LowConfidence", "threshold": 0.3}
JOINT = {"algorithm": "JointThreshold", "threshold": 0.25, "edit_threshold": 0.2,
         "max_post_edit_steps": 4, "penalty_lambda": 0.5}  # fmt: skip
ENDS = [11, 250, 272]  # what the tiny model likes to write
EDITS = {
    "nothing": {},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "encouraged": {"frequency_penalty": -0.7, "repetition_penalty": 0.8},
    "biased": {"logit_bias": {"7": 3.0, "250": -100, "93": 1}},
    "allowed": {"allowed_token_ids": [*range(3, 40), *ENDS], "presence_penalty": 1.0},
    "minimum": {"min_new_tokens": 13, "stop_token_ids": ENDS},
    "ends": {"stop_token_ids": [272, 55], "frequency_penalty": 0.9},
    "all": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2,
            "logit_bias": {"11": 1.5}, "min_new_tokens": 5, "stop_token_ids": [130, 25]},
}  # fmt: skip
ATOL = 2e-4  # of float32 against float64; logits are of the order of 5


@functools.cache
def model():
    return jdllm.load_model(GOLDEN, dtype="float32", block_size=BLOCK)


def logits_of(ids):
    whole = np.zeros((1, 96), np.int32)  # one shape; blocks behind are never seen
    whole[0, : len(ids)] = ids
    return np.asarray(model().logits(whole))[0, : len(ids)]


def case(name, dllm, seed=0):
    rng = np.random.default_rng([seed, len(name)])
    prompt = rng.integers(0, VOCAB - 1, int(rng.integers(1, 30))).tolist()
    params = {"max_new_tokens": 21, "ignore_eos": True, "dllm": dllm} | EDITS[name]
    return prompt, params


def generate(engine, cases, **more):
    return engine.generate(
        input_ids=[prompt for prompt, _ in cases],
        sampling_params=[
            params | {"return_logprob": True, "top_logprobs": 5} | more for _, params in cases
        ],
    )


def mask_id(engine):
    return engine._built.spec.diffusion.mask_token_id


def check(result, expected):
    meta = result["meta_info"]
    assert result["output_ids"] == expected.ids
    got = [value for value, _, _ in meta["output_token_logprobs"]]
    np.testing.assert_allclose(got, expected.logprobs, atol=ATOL)
    assert len(meta["output_top_logprobs"]) == len(expected.top)
    for best, wanted in zip(meta["output_top_logprobs"], expected.top, strict=True):
        assert len(best) == len(wanted)
        values = [value for value, _, _ in best]
        np.testing.assert_allclose(values, [value for _, value in wanted], atol=ATOL)
        for (value, token, _), (other, other_value) in zip(best, wanted, strict=True):
            near = [v for _, v in wanted if abs(v - value) < 2 * ATOL]
            assert token == other or len(near) > 1, (value, other_value)


CASES = [(name, dllm) for name in EDITS for dllm in (LOW, JOINT)]


def test_a_batch_of_all_edits_gives_what_the_oracle_says(engine):
    """Some rows of the batch ask for nothing, and some sample; launches overlap."""
    cases = [case(name, dllm) for name, dllm in CASES]
    others = [
        ([5, 6, i], {"max_new_tokens": 17, "temperature": i % 2, "seed": i}) for i in range(4)
    ]
    alone = [engine.generate(input_ids=p, sampling_params=s) for p, s in others]
    before = engine.stats().jit_compiles_total
    asked = [(p, s | {"return_logprob": True, "top_logprobs": 5}) for p, s in cases]
    rows = [*others[:2], *asked, *others[2:]]
    results = engine.generate(input_ids=[p for p, _ in rows], sampling_params=[s for _, s in rows])
    assert engine.stats().jit_compiles_total == before
    mixed = results[:2] + results[-2:]
    assert [r["output_ids"] for r in mixed] == [r["output_ids"] for r in alone]
    for (prompt, params), result in zip(cases, results[2:-2], strict=True):
        expected = logit_oracle.block_alone(
            logits_of, prompt, params, block=BLOCK, mask=mask_id(engine)
        )
        check(result, expected)
    assert_nothing_held(engine)


def test_overlap_fused_commits_and_launches_of_many_steps_change_nothing(engine, plain_engine):
    cases = [case(name, dllm, seed=1) for name, dllm in CASES]
    one_by_one = [generate(plain_engine, [one])[0] for one in cases]
    together = generate(engine, cases)
    assert [r["output_ids"] for r in together] == [r["output_ids"] for r in one_by_one]


def test_lists_change_no_token(engine):
    cases = [case("nothing", dllm, seed) for dllm in (LOW, JOINT) for seed in range(2)]
    cases += [(p, s | {"temperature": 0.9, "seed": 3}) for p, s in cases]
    listed = generate(engine, cases)
    plain = generate(engine, cases, top_logprobs=0)
    assert [r["output_ids"] for r in listed] == [r["output_ids"] for r in plain]
    assert [r["meta_info"]["nfe"] for r in listed] == [r["meta_info"]["nfe"] for r in plain]


@pytest.mark.campaign
def test_a_preempted_row_counts_what_it_wrote_before():
    cases = [case(name, dllm, seed=2) for name, dllm in CASES[:12]]
    with make_engine(with_logits=True, max_total_tokens=10 * 16) as small:
        results = generate(small, cases)
        assert small.stats().preemptions_total > 0
        assert_nothing_held(small)
        mask = mask_id(small)
    for (prompt, params), result in zip(cases, results, strict=True):
        check(result, logit_oracle.block_alone(logits_of, prompt, params, block=BLOCK, mask=mask))


def test_draws_keep_to_the_edited_logits(engine):
    prompt, params = case("nothing", LOW)
    sampled = params | {"temperature": 1.3, "seed": 5}

    def ids(**more):
        return engine.generate(input_ids=prompt, sampling_params=sampled | more)["output_ids"]

    greedy = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
    assert ids() != greedy
    assert ids(logit_bias={"7": 0.0}) == ids(min_p=1e-9) == ids()
    assert ids(min_p=1.0) == greedy
    assert set(ids(allowed_token_ids=[3, 4, 5])) <= {3, 4, 5}
    assert not set(ids(logit_bias={str(token): -100 for token in set(ids())})) & set(ids())


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_new_tokens": 1},
         "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),  # this engine has no tokenizer
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"min_tokens": 1, "min_new_tokens": 2}, "min_tokens"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"return_logprob": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": -1}, "logprobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(engine, params, param):
    with pytest.raises(errors.RequestError) as raised:
        engine.generate(input_ids=[1], sampling_params=params)
    assert raised.value.param == param


def test_vllms_name_for_lists_is_understood(engine):
    for wanted, count in ((True, None), (0, None), (3, 3)):
        params = {"max_new_tokens": 2, "logprobs": wanted}
        meta = engine.generate(input_ids=[1], sampling_params=params)["meta_info"]
        assert len(meta["output_token_logprobs"]) == 2
        assert (len(meta["output_top_logprobs"][0]) if count else None) == count
