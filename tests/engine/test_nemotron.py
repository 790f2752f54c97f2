"""Nemotron-Labs-Diffusion served: its three modes against stored generations and an oracle.

The stored counts of autoregressive and LinearSpec runs are ours: the forward of the prompt's last
token is one of them. Those of block runs leave it out, and have the forward that computes K,V of
the last block, which we never run; so they are equal, too.
"""

import json

import numpy as np
import pytest
from support import nemotron_asks, nemotron_oracle
from support.nemotron_asks import AR, BLOCK, DIFFUSION, MASK, SPEC, random_case, sampled
from support.tiny_engine import GOLDEN, alone, answers, assert_nothing_held

from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

FOLDER = GOLDEN.parent / "nemotron_diffusion"
RUNS = json.loads((FOLDER / "meta.json").read_text())["runs"]
(OF_16,) = (i for i, run in enumerate(RUNS) if run.get("block_length") == 16)
CONTEXT = 128


def make(dllm_algorithm=f"{DIFFUSION},{AR},{SPEC},LowConfidence", **options):
    return nemotron_asks.make(FOLDER, dllm_algorithm, **options)


@pytest.fixture(scope="module")
def engine():
    with make() as engine:
        yield engine


@pytest.fixture(scope="module")
def large():
    """Blocks of 16, of which steps compute 8 positions if that is enough."""
    with make(dllm_algorithm_config={"block_size": 16}, dllm_algorithm=f"{AR},{SPEC}") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle():
    return nemotron_oracle.Model(FOLDER)


def options_of(run):
    """Returns the options of a stored run; its steps are those of all blocks."""
    if run["mode"] != "diffusion":
        is_spec = run["mode"] == "linear_spec"
        name = SPEC if is_spec else AR
        return {"algorithm": name} | ({"block_length": run["block_length"]} if is_spec else {})
    steps = run["steps"] * run["block_length"] // run["max_new_tokens"]
    found = {"seed_first": run["seed_first"], "max_denoising_steps": steps, "algorithm": DIFFUSION}
    if run["threshold"] is None:
        return found | {"selection_policy": "low_confidence"}
    return found | {"threshold": run["threshold"]}


def check_run(number, engine):
    run = RUNS[number]
    prompt, whole = (np.load(FOLDER / f"gen{number}_{one}.npy")[0] for one in ("prompt", "output"))
    expected = whole[len(prompt) :].tolist()
    params = {"max_new_tokens": run["max_new_tokens"], "dllm": options_of(run)}
    params |= {"ignore_eos": True, "stop_token_ids": [run["eos"]] if "eos" in run else []}
    result = engine.generate(input_ids=prompt.tolist(), sampling_params=params)
    assert result["output_ids"] == expected
    assert result["meta_info"]["nfe"] == run["nfe"]
    assert result["meta_info"]["tpf"] == pytest.approx(len(expected) / run["nfe"], abs=1e-4)
    if "accepted" in run:
        assert result["meta_info"]["dllm"]["blocks"] == 1 + len(run["accepted"])


@pytest.mark.parametrize("number", [i for i in range(len(RUNS)) if i != OF_16])
def test_generation_equals_the_reference_token_for_token(number, engine):
    check_run(number, engine)


def test_generation_in_blocks_of_16_equals_the_reference(large):
    check_run(OF_16, large)


def test_requests_together_give_the_oracle_s_tokens_and_forwards_and_so_do_hits(engine, oracle):
    rng = np.random.default_rng(0)
    cases = [random_case(rng, i) for i in range(24)]
    shared = rng.integers(0, MASK, 40).tolist()
    cases += [([*shared, i], params, answer) for i, (_, params, answer) in enumerate(cases[:8])]
    asked = {
        "input_ids": [prompt for prompt, _, _ in cases],
        "sampling_params": [params for _, params, _ in cases],
    }
    compiles = engine.stats().jit_compiles_total
    assert engine.flush_cache()
    first = engine.generate(**asked)
    again = engine.generate(**{name: some[-8:] for name, some in asked.items()})
    drafted, ended = 0, 0
    for (prompt, params, (function, settings)), result in zip(cases, first, strict=True):
        expected, nfe = function(oracle, prompt, params["max_new_tokens"], **settings)
        assert result["output_ids"] == expected, params
        assert result["meta_info"]["nfe"] == nfe, params
        if params["dllm"].get("algorithm") == SPEC:
            assert (
                expected
                == nemotron_oracle.autoregressive(
                    oracle, prompt, params["max_new_tokens"], settings["ends"]
                )[0]
            )
            drafted += len(expected) > result["meta_info"]["dllm"]["blocks"]
        ended += result["meta_info"]["finish_reason"]["type"] == "stop"
    assert drafted and ended, "drafts were accepted, and end tokens met"
    assert answers(again) == answers(first[-8:])
    hits = [[r["meta_info"]["cached_tokens"] for r in results] for results in (first[-8:], again)]
    assert hits[0][0] == 0 < max(hits[0])
    assert min(hits[1]) == 32, "two whole pages of the 40 tokens that prompts share"
    assert engine.stats().jit_compiles_total == compiles
    assert_nothing_held(engine)


def test_drawn_text_of_linear_spec_is_that_of_autoregressive_decoding(engine):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, MASK, 20 + i).tolist() for i in range(6)]
    plain = engine.generate(
        input_ids=prompts, sampling_params=[sampled(i, algorithm=AR) for i in range(6)]
    )
    drafts = engine.generate(
        input_ids=prompts,
        sampling_params=[sampled(i, algorithm=SPEC, block_length=2 + i) for i in range(6)],
    )
    for one, other in zip(plain, drafts, strict=True):
        assert other["output_ids"] == one["output_ids"]
        logprobs = [
            [logprob for logprob, *_ in result["meta_info"]["output_token_logprobs"]]
            for result in (one, other)
        ]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
        assert one["meta_info"]["nfe"] == one["meta_info"]["dllm"]["blocks"] == 40
    assert sum(r["meta_info"]["dllm"]["blocks"] for r in drafts) < 6 * 40, "some were accepted"
    assert len({tuple(r["output_ids"]) for r in plain}) == 6


@pytest.mark.parametrize("name", [AR, SPEC, DIFFUSION, "LowConfidence"])
def test_limits_are_exact_and_the_context_can_be_used_to_its_last_token(name, engine):
    for wanted in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        params = {"max_new_tokens": wanted, "ignore_eos": True, "dllm": {"algorithm": name}}
        for length in (11, CONTEXT - wanted):
            result = engine.generate(input_ids=[5] * length, sampling_params=params)
            assert len(result["output_ids"]) == wanted
        with pytest.raises(errors.RequestTooLong, match="128"):
            engine.generate(input_ids=[5] * (length + 1), sampling_params=params)


def test_what_a_mode_does_not_know_is_refused_by_name(engine):
    for dllm, name in (
        ({"algorithm": AR, "threshold": 0.5}, "threshold"),
        ({"algorithm": SPEC, "seed_first": True}, "seed_first"),
        ({"algorithm": SPEC, "block_length": 0}, "block_length"),
        ({"algorithm": SPEC, "draft_adapter": "linear_spec_lora"}, "draft_adapter"),
        ({"algorithm": SPEC, "stream_mode": "denoise"}, "stream_mode"),
        ({"algorithm": "HierarchyBlock"}, "HierarchyBlock"),
    ):
        with pytest.raises(errors.RequestError, match=name):
            engine.generate(input_ids=[1], sampling_params={"dllm": dllm})


def mixed(count):
    rng = np.random.default_rng(2)
    cases = [random_case(rng, i) for i in range(count)]
    prompts = [prompt for prompt, _, _ in cases]
    params = [one | {"max_new_tokens": 60} for _, one, _ in cases]
    for i in range(0, count, 3):
        params[i] = sampled(i, **params[i]["dllm"]) | {"max_new_tokens": 60}
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        {"max_total_tokens": 9 * 16},
        {"num_continuous_decode_steps": 1, "disable_overlap_schedule": True},
    ],
    ids=["preempted", "one step per launch, without overlap"],
)
def test_how_launches_are_made_changes_no_token(options, engine):
    prompts, params = mixed(12)
    expected = answers(alone(engine, prompts, params))
    with make(**options) as other:
        assert answers(other.generate(input_ids=prompts, sampling_params=params)) == expected
        assert (other.stats().preemptions_total > 0) == ("max_total_tokens" in options)
        assert_nothing_held(other)


def test_drafts_of_any_length_give_the_same_text(large):
    """Also in a batch whose steps compute 8 of 16 positions, as long as that suffices."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, MASK, 30).tolist()
    params = {"max_new_tokens": 48, "ignore_eos": True}
    plain = large.generate(input_ids=prompt, sampling_params=params | {"dllm": {"algorithm": AR}})
    lengths = [1, 2, 7, 8, 9, 15, 16, 40]
    results = large.generate(
        input_ids=[prompt] * len(lengths),
        sampling_params=[
            params | {"dllm": {"algorithm": SPEC, "block_length": length}} for length in lengths
        ],
    )
    assert all(result["output_ids"] == plain["output_ids"] for result in results)
    forwards = [result["meta_info"]["nfe"] for result in results]
    assert forwards[0] == plain["meta_info"]["nfe"] == 48
    assert forwards[-1] == forwards[-2], "no block is longer than the model's"
    before = large._built.core.counters.computed_positions
    large.generate(input_ids=prompt, sampling_params=params | {"dllm": {"algorithm": AR}})
    assert large._built.core.counters.computed_positions - before <= 48 * 8 + 32


@pytest.fixture(scope="module")
def with_logits():
    with make(with_logits=True, max_running_requests=1) as engine:
        yield engine


@pytest.mark.parametrize("name", [AR, SPEC, DIFFUSION])
def test_lists_and_edited_logits_are_those_of_the_token_s_own_forward(name, with_logits, oracle):
    """A token of a causal forward has the logits of the token before it."""
    prompt = np.random.default_rng(4).integers(0, MASK, 21).tolist()
    dllm = {"algorithm": name} | ({"seed_first": True} if name == DIFFUSION else {})
    asked = {"max_new_tokens": 20, "ignore_eos": True, "dllm": dllm}
    lists = {"return_logprob": True, "top_logprobs_num": 3}
    plain = with_logits.generate(input_ids=prompt, sampling_params=asked)
    listed = with_logits.generate(input_ids=prompt, sampling_params=asked | lists)
    ids = plain["output_ids"]
    assert listed["output_ids"] == ids
    firsts = range(0, 20, BLOCK) if name == DIFFUSION else range(20)
    for i in firsts:
        logits = oracle.forward([*prompt, *ids[:i]])[-1]
        logprobs = logits - np.log(np.exp(logits).sum())
        best = [token for token in np.argsort(-logprobs) if token != MASK][:3]
        found = listed["meta_info"]["output_top_logprobs"][i]
        assert ids[i] == best[0] and [token for _, token, _ in found] == best
        np.testing.assert_allclose([p for p, _, _ in found], logprobs[best], atol=1e-4)
    biased = asked | {"logit_bias": {"7": 100.0}}
    result = with_logits.generate(input_ids=prompt, sampling_params=biased)
    assert result["output_ids"] == [7] * 20


def test_penalties_and_steps_are_honoured(with_logits, oracle):
    prompt = np.random.default_rng(5).integers(0, MASK, 21).tolist()
    asked = {"max_new_tokens": 24, "ignore_eos": True, "frequency_penalty": 2.0}
    texts = [
        with_logits.generate(
            input_ids=prompt, sampling_params=asked | {"dllm": {"algorithm": name}}
        )["output_ids"]
        for name in (AR, SPEC)
    ]
    expected = []
    while len(expected) < 24:
        row = oracle.forward([*prompt, *expected])[-1]
        row = row - 2.0 * np.bincount(expected, minlength=len(row))
        expected.append(oracle.best(row)[0])
    assert texts == [expected] * 2
    shows = {"max_new_tokens": 24, "ignore_eos": True,
             "dllm": {"seed_first": True, "threshold": 0.3, "stream_mode": "denoise"}}  # fmt: skip
    events = list(with_logits.generate(input_ids=prompt, sampling_params=shows, stream=True))
    frames = [frame for event in events for frame in event.get("frames", ())]
    ids, nfe = events[-1]["output_ids"], events[-1]["meta_info"]["nfe"]
    assert len(frames) == nfe, "each forward writes: the causal one the first token of a block"
    for frame in frames:
        for i, token in enumerate(frame["token_ids"], frame["start"]):
            assert token in (None, ids[i])
    assert frames[0]["token_ids"][0] == ids[0] and frames[0]["token_ids"][1] is None
