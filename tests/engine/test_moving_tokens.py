"""A model whose tokens move inside a block (LLaDA2.2), as it is used: streams, frames, HTTP.

The oracle of the frames is the stored trace of the reference: every block before and after each of
its steps. Limits, stop rules and counts are those of a request without any.
"""

import json
import math

import numpy as np
import pytest
from support import canvas_engine, edge
from support.tiny_engine import BLOCK, GOLDEN, assert_nothing_held

from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

INDEL = GOLDEN.parent / "llada22"
RUNS = json.loads((INDEL / "meta.json").read_text())["runs"]
MASK_ID = 300
ASK = {"return_step_map": True, "return_logprob": True, "ignore_eos": True}
PROMPT, WANTED = [7, 9, 11], 29


def generate(engine, **params):
    return engine.generate(
        input_ids=PROMPT, sampling_params=ASK | {"max_new_tokens": WANTED} | params
    )


def stream(engine, prompt=PROMPT, **params):
    asked = ASK | {"max_new_tokens": WANTED} | params
    return list(engine.generate(input_ids=prompt, sampling_params=asked, stream=True))


def traced_blocks(run):
    """Yields (the block's first position in the output, its tokens after each step) of a run.

    A first block begins before the output; a token is None where it is masked.
    """
    trace, at = np.load(INDEL / f"gen{run}_trace.npy"), 0
    start = -(RUNS[run]["prompt_len"] % BLOCK)
    for count in RUNS[run]["steps_per_block"]:
        yield (
            max(0, start),
            [
                [None if token == MASK_ID else token for token in after[max(0, -start) :].tolist()]
                for after in trace[at : at + count, 1]
            ],
        )
        at, start = at + count, start + BLOCK


@pytest.mark.parametrize(
    "run", [1, 4, *(pytest.param(run, marks=pytest.mark.campaign) for run in (0, 2, 3))]
)
def test_frames_show_every_token_where_it_then_is(indel_engine, run):
    meta = RUNS[run]
    prompt = np.load(INDEL / f"gen{run}_prompt.npy")[0].tolist()
    dllm = meta["config"] | {"stream_mode": "denoise"}
    events = stream(indel_engine, prompt, max_new_tokens=meta["gen_length"], dllm=dllm)
    frames, last = [frame for event in events for frame in event.get("frames", ())], events[-1]
    info = last["meta_info"]
    num_vanished, output = 0, []
    for start, expected in traced_blocks(run):
        shown = [frame for frame in frames if frame["start"] == start]
        assert [frame["step"] for frame in shown] == [*range(1, len(shown) + 1)]
        assert [frame["token_ids"] for frame in shown] == [tuple(one) for one in expected][
            : len(shown)
        ]
        # What is left is the forward that only persists the block.
        assert expected[len(shown) :] in ([], [expected[len(shown) - 1]])
        for before, after in zip(expected, expected[1:], strict=False):
            num_vanished += sum(a is not None and b is None for a, b in zip(before, after))
        for frame in shown:
            assert [one is None for one in frame["logprobs"]] == [
                one is None for one in frame["token_ids"]
            ]
        output += expected[-1]
        # Each token of the answer was written in its step, wherever it stood then.
        for place in range(start, start + len(expected[-1])):
            told = info["output_token_logprobs"][place]
            frame = shown[info["step_map"][place] - 1]
            assert any(
                token == told[1] and math.isclose(logprob, told[0], abs_tol=1e-4)
                for token, logprob in zip(frame["token_ids"], frame["logprobs"], strict=True)
                if token is not None
            )
    assert num_vanished > 0, "no token gave way to a mask"
    assert last["output_ids"] == output
    assert frames[-1]["num_final"] == len(output)


def test_limits_and_stop_tokens_cut_the_answer_and_change_nothing(indel_engine):
    whole = generate(indel_engine)
    ids, steps = whole["output_ids"], whole["meta_info"]["step_map"]
    assert len(ids) == whole["meta_info"]["completion_tokens"] == WANTED
    for wanted in (1, BLOCK - len(PROMPT), BLOCK, 2 * BLOCK):
        cut = generate(indel_engine, max_new_tokens=wanted)
        assert cut["output_ids"] == ids[:wanted]
        assert cut["meta_info"]["step_map"] == steps[:wanted]
        assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": wanted}
    stop = next(token for i, token in enumerate(ids) if i > BLOCK and token not in ids[:i])
    place = ids.index(stop)
    stopped = generate(indel_engine, stop_token_ids=[stop])
    assert stopped["output_ids"] == ids[: place + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    blocks = -(-(len(PROMPT) + place + 1) // BLOCK)
    assert stopped["meta_info"]["dllm"]["blocks"] == blocks
    assert stopped["meta_info"]["nfe"] < whole["meta_info"]["nfe"]
    assert_nothing_held(indel_engine)


def test_a_stream_shows_whole_blocks_only(indel_engine):
    whole = generate(indel_engine)
    events = stream(indel_engine)
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(set(lengths)) and len(lengths) > 1
    assert all((len(PROMPT) + length) % BLOCK == 0 for length in lengths[:-1])
    assert all(event["output_ids"] == whole["output_ids"][: len(event["output_ids"])]
               for event in events)  # fmt: skip
    for name in ("step_map", "nfe", "completion_tokens", "dllm"):
        assert events[-1]["meta_info"][name] == whole["meta_info"][name], name


def test_over_http_the_stream_tells_the_text_and_the_usage_of_the_whole_answer(indel_engine):
    server = edge.make_state(indel_engine)
    body = {
        "model": "m",
        "prompt": canvas_engine.text(PROMPT),
        "max_tokens": WANTED,
        "ignore_eos": True,
        "temperature": 0,
    }
    whole = edge.call(server, "/v1/completions", body).json()
    expected = generate(indel_engine)
    assert whole["choices"][0]["text"] == canvas_engine.text(expected["output_ids"])
    assert whole["usage"]["completion_tokens"] == WANTED
    assert whole["usage"]["dllm"]["nfe"] == expected["meta_info"]["nfe"]
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    plain = edge.frames(edge.call(server, "/v1/completions", asked))
    denoise = {"dllm": {"stream_mode": "denoise"}}
    shown = edge.frames(edge.call(server, "/v1/completions", asked | denoise))
    for parts in (plain, [part for part in shown if part["object"] != "jdllm.denoise"]):
        pieces = [choice["text"] for part in parts for choice in part["choices"]]
        assert "".join(pieces) == whole["choices"][0]["text"]
        assert sum(map(bool, pieces)) > 1
        assert parts[-1]["usage"] == whole["usage"]
    text = []
    for part in shown:
        if part["object"] == "jdllm.denoise":
            text[part["start"] :] = [one["text"] for one in part["canvas"]]
    assert "".join(text) == whole["choices"][0]["text"]


def test_a_least_number_of_tokens_is_refused_by_name(indel_engine):
    server = edge.make_state(indel_engine)
    body = {"model": "m", "prompt": canvas_engine.text(PROMPT), "max_tokens": 8, "min_tokens": 3}
    response = edge.call(server, "/v1/completions", body)
    assert response.status_code == 400
    assert "min_tokens" in edge.error_of(response)["param"]
    with pytest.raises(errors.RequestError, match="min_new_tokens=3 .*JointThresholdInDel"):
        generate(indel_engine, min_new_tokens=3)
    # Another algorithm of the same server moves nothing, so it may promise a length.
    other = generate(indel_engine, min_new_tokens=3, dllm={"algorithm": "LowConfidence"})
    assert len(other["output_ids"]) == WANTED


def test_a_trace_of_decisions_is_refused_by_name_and_shown_for_other_rules(indel_engine):
    with pytest.raises(errors.RequestError, match="JointThresholdInDel moves tokens"):
        indel_engine.trace(PROMPT, {"max_new_tokens": 8})
    shown = indel_engine.trace(
        PROMPT, {"max_new_tokens": 8, "dllm": {"algorithm": "LowConfidence"}}
    )
    assert shown.steps
    assert_nothing_held(indel_engine)
