"""What an output looked like after each step: `stream_mode: "denoise"`, for both kinds of rows.

The oracle is the step map of a request that asks for no frames: the steps that wrote the final
tokens say what each step must show, wherever a rule never rewrites a token.
"""

from __future__ import annotations

import math

import pytest
from support import canvas_engine
from support.tiny_engine import BLOCK

from jdllm import errors
from jdllm.options import sampling_params

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

PROMPT = [7, 9, 11]
ASK = {"return_step_map": True, "return_logprob": True, "ignore_eos": True, "max_new_tokens": 29}


def watched(engine, prompt, **params):
    """Returns (all frames, the last event) of a stream that shows its steps."""
    dllm = params.pop("dllm", {}) | {"stream_mode": "denoise"}
    events = list(
        engine.generate(
            input_ids=prompt, sampling_params=ASK | params | {"dllm": dllm}, stream=True
        )
    )
    return [frame for event in events for frame in event.get("frames", ())], events[-1]


def silent(engine, prompt, **params):
    return engine.generate(input_ids=prompt, sampling_params=ASK | params)


def finals(frames):
    """Returns the output as the frames alone tell it: each replaces what was from `start` on."""
    out = []
    for frame in frames:
        out[frame["start"] :] = frame["token_ids"]
    return out


def check_against_the_step_map(frames, result):
    """Every frame has the tokens of the steps so far and no others, with their probabilities."""
    ids, steps = result["output_ids"], result["meta_info"]["step_map"]
    logprobs = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
    for frame in frames:
        assert frame["token_ids"], "an empty frame"
        for i, (token, logprob) in enumerate(
            zip(frame["token_ids"], frame["logprobs"], strict=True), frame["start"]
        ):
            if i >= len(ids):
                continue  # behind the end of the output
            is_written = steps[i] <= frame["step"]
            assert token == (ids[i] if is_written else None)
            assert (logprob is None) == (not is_written)
            if logprob is not None:
                assert math.isclose(logprob, logprobs[i], abs_tol=1e-4)
            assert is_written or frame["num_final"] <= i


@pytest.mark.parametrize("threshold", [0.9, 0.05])
def test_the_frames_of_blocks_are_those_of_the_step_map(engine, threshold):
    dllm = {"threshold": threshold}
    frames, last = watched(engine, PROMPT, dllm=dllm)
    result = silent(engine, PROMPT, dllm=dllm)
    assert last["output_ids"] == result["output_ids"] == finals(frames)
    assert last["meta_info"]["step_map"] == result["meta_info"]["step_map"]
    check_against_the_step_map(frames, result)
    # A frame for every step of every block, in order.
    steps_of = {}
    for place, step in enumerate(result["meta_info"]["step_map"], len(PROMPT)):
        steps_of.setdefault(place // BLOCK, set()).add(step)
    expected = [
        (max(0, block * BLOCK - len(PROMPT)), step)
        for block in sorted(steps_of)
        for step in sorted(steps_of[block])
    ]
    shown = [(frame["start"], frame["step"]) for frame in frames]
    assert [one for one in shown if one in set(expected)] == expected
    assert shown == sorted(shown)


def test_an_edit_is_seen(engine, plain_engine):
    """Each edit that the engine counts is one token that gives way to another between frames."""
    params = {"dllm": {"algorithm": "JointThreshold", "threshold": 0.05, "edit_threshold": 0.02}}
    frames, last = watched(engine, PROMPT, **params)
    edits, before = 0, None
    for frame in frames:
        if before is not None and before["start"] == frame["start"]:
            pairs = zip(before["token_ids"], frame["token_ids"], strict=False)
            edits += sum(old is not None and old != new for old, new in pairs)
        before = frame
    assert edits == last["meta_info"]["dllm"]["edited_tokens"] > 0
    assert finals(frames) == last["output_ids"]
    # One step a launch and no fused commits show the same.
    again, _ = watched(plain_engine, PROMPT, **params)
    keys = ("step", "start", "token_ids", "num_final")
    assert [[f[k] for k in keys] for f in again] == [[f[k] for k in keys] for f in frames]


def test_frames_stop_at_the_end_of_the_output(engine):
    """A stop token inside a block: the last frame has the output and nothing behind it."""
    ids = silent(engine, PROMPT)["output_ids"]
    stop = ids[12]
    frames, last = watched(engine, PROMPT, stop_token_ids=[stop])
    assert last["output_ids"] == ids[: ids.index(stop) + 1] == finals(frames)
    assert frames[-1]["num_final"] == len(last["output_ids"])


@pytest.fixture(scope="module")
def canvases():
    return canvas_engine.shared("llada")


CANVAS = [
    {"algorithm": "LLaDA", "block_length": 8, "steps": 6},
    {"algorithm": "FastDLLM", "threshold": 0.02, "block_length": 8},
    {"algorithm": "FullAttnMultiBlock", "block_length": 8},
]


@pytest.mark.parametrize("dllm", CANVAS, ids=lambda one: one["algorithm"])
def test_the_frames_of_a_canvas_are_those_of_the_step_map(canvases, dllm):
    params = {"dllm": dllm, "max_new_tokens": 24}
    frames, last = watched(canvases, PROMPT, **params)
    result = silent(canvases, PROMPT, **params)
    assert last["output_ids"] == result["output_ids"] == finals(frames)
    check_against_the_step_map(frames, result)
    assert [f["step"] for f in frames] == sorted(set(result["meta_info"]["step_map"]))


def test_a_canvas_is_shown_up_to_its_end_token(canvases):
    """Positions behind an end token are no output, whatever fills them."""
    params = {"dllm": CANVAS[2], "max_new_tokens": 24}
    ids = silent(canvases, PROMPT, **params)["output_ids"]
    stop = ids[13]
    frames, last = watched(canvases, PROMPT, **params, stop_token_ids=[stop])
    assert finals(frames) == last["output_ids"]
    assert last["output_ids"][-1] == stop
    for frame in frames:
        assert stop not in frame["token_ids"][:-1]


@pytest.mark.parametrize("which", ["engine", "canvases"])
def test_together_equals_alone_and_those_who_do_not_ask_get_the_same(which, request):
    engine = request.getfixturevalue(which)
    prompts = [[3 + i] * (5 + 3 * i) for i in range(3)]
    params = [ASK | {"max_new_tokens": 16 + 4 * i} for i in range(3)]
    asking = [
        one | {"dllm": {"stream_mode": "denoise"}} if i != 1 else one
        for i, one in enumerate(params)
    ]
    alone = [
        list(engine.generate(input_ids=[prompt], sampling_params=[one], stream=True))
        for prompt, one in zip(prompts, asking, strict=True)
    ]
    together = list(engine.generate(input_ids=prompts, sampling_params=asking, stream=True))
    plain = engine.generate(input_ids=prompts, sampling_params=params)
    for i, events in enumerate(alone):
        mine = [event for event in together if event["prompt_index"] == i]
        shown = [[f for event in some for f in event.get("frames", ())] for some in (events, mine)]
        assert bool(shown[0]) == (i != 1)
        keys = ("step", "start", "token_ids", "num_final")
        assert [[f[k] for k in keys] for f in shown[0]] == [[f[k] for k in keys] for f in shown[1]]
        assert events[-1]["output_ids"] == mine[-1]["output_ids"] == plain[i]["output_ids"]
        assert mine[-1]["meta_info"]["step_map"] == plain[i]["meta_info"]["step_map"]


def test_nothing_is_compiled_for_it(engine, canvases):
    for one in (engine, canvases):
        before = one.stats().jit_compiles_total
        watched(one, PROMPT, max_new_tokens=12)
        assert one.stats().jit_compiles_total == before


def test_it_is_refused_where_nobody_would_see_it(engine):
    ask = {"max_new_tokens": 4, "dllm": {"stream_mode": "denoise"}}
    with pytest.raises(errors.RequestError, match="needs stream=True") as refused:
        engine.generate(input_ids=[1], sampling_params=ask)
    assert refused.value.param == "dllm.stream_mode"
    with pytest.raises(errors.RequestError, match="stream_mode is one of block, denoise"):
        sampling_params.SamplingParams(dllm={"stream_mode": "words"})
    plain = engine.generate(
        input_ids=[1], sampling_params=ask | {"dllm": {"stream_mode": "block"}}, stream=True
    )
    assert all("frames" not in event for event in plain)
