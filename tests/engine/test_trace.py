"""`Engine.trace`: which step decided what, for both kinds of rows, and what is drawn of it.

The oracle is a request that asks for no frames: its step map, its tokens, its log-probabilities.
"""

from __future__ import annotations

import io
import math
import re
import sys
import types

import pytest
from support import canvas_engine

from jdllm import errors
from jdllm.engine import answer_steps, trace_view

PROMPT = [7, 9, 11]
LONG = {"ignore_eos": True, "max_new_tokens": 29}


def silent(engine, prompt, params, **fixed):
    asked = params | {"return_step_map": True, "return_logprob": True}
    return engine.generate(input_ids=prompt, sampling_params=asked, **fixed)


def check(trace, answer):
    """Every position is decided once, in the step and with the probability of the plain answer."""
    meta = answer["meta_info"]
    assert list(trace.output_ids) == answer["output_ids"]
    decided = [(one, step) for step in trace.steps for one in step.decided]
    assert [step.number for step in trace.steps] == list(range(1, len(trace.steps) + 1))
    written = {place: step for place, step in enumerate(meta["step_map"]) if step}
    assert sorted(one.position for one, _ in decided) == sorted(written)
    for one, step in decided:
        assert step.step == written[one.position]
        assert one.token_id == answer["output_ids"][one.position]
        assert one.replaced is None
        logprob = meta["output_token_logprobs"][one.position][0]
        assert math.isclose(math.log(one.confidence), logprob, abs_tol=1e-4)
        assert trace.decided_at[one.position] == step.number
        assert trace.confidences[one.position] == one.confidence
    known: set[int] = set(range(len(meta["step_map"]))) - set(written)
    for step in trace.steps:
        known |= {one.position for one in step.decided}
        shown = {i for i, token in enumerate(step.token_ids) if token is not None}
        assert shown == {i for i in known if i < len(step.token_ids)}
        assert step.num_final <= next(
            (i for i, token in enumerate(step.token_ids) if token is None), len(step.token_ids)
        )
    assert list(trace.steps[-1].token_ids) == answer["output_ids"]
    assert trace.steps[-1].num_final == len(answer["output_ids"])


@pytest.mark.campaign
@pytest.mark.parametrize("threshold", [0.9, 0.05])
def test_a_trace_of_blocks_is_the_plain_answer_step_by_step(engine, threshold):
    params = LONG | {"dllm": {"threshold": threshold}}
    trace = engine.trace(PROMPT, params)
    check(trace, silent(engine, PROMPT, params))
    assert trace.meta_info["nfe"] >= len(trace.steps)


@pytest.mark.campaign
def test_a_trace_ends_where_the_output_ends(engine):
    stop = silent(engine, PROMPT, LONG)["output_ids"][12]
    params = LONG | {"stop_token_ids": [stop]}
    answer = silent(engine, PROMPT, params)
    trace = engine.trace(PROMPT, params)
    assert list(trace.output_ids) == answer["output_ids"]
    assert max(len(step.token_ids) for step in trace.steps) == len(answer["output_ids"])


@pytest.mark.campaign
def test_edits_say_what_they_replaced(engine):
    dllm = {"algorithm": "JointThreshold", "threshold": 0.05, "edit_threshold": 0.02}
    trace = engine.trace(PROMPT, LONG | {"dllm": dllm})
    edits = [one for step in trace.steps for one in step.decided if one.replaced is not None]
    assert len(edits) == trace.meta_info["dllm"]["edited_tokens"] > 0
    assert all(one.replaced != one.token_id for one in edits)
    for one in edits:
        before = next(s for s in reversed(trace.steps) if one in s.decided).number - 2
        assert trace.steps[before].token_ids[one.position] == one.replaced


@pytest.fixture(scope="module")
def canvases():
    return canvas_engine.shared("llada")


@pytest.mark.campaign
def test_a_trace_of_a_canvas_leaves_out_what_was_given(canvases):
    params = {
        "max_new_tokens": 24,
        "ignore_eos": True,
        "dllm": {"algorithm": "LLaDA", "block_length": 8, "steps": 6},
    }
    fixed = {"suffix": [5, 6], "given": {2: 33, 9: 44}}
    trace = canvases.trace(PROMPT, params, **fixed)
    check(trace, silent(canvases, PROMPT, params, **fixed))
    assert [i for i, step in enumerate(trace.decided_at) if step == 0] == [2, 9]
    assert trace.confidences[2] is None


@pytest.mark.campaign
def test_what_cannot_be_traced_is_refused_by_name(engine, canvases):
    with pytest.raises(errors.RequestError, match="one choice, got n=2"):
        engine.trace(PROMPT, {"n": 2})
    for one in (engine, canvases):
        with pytest.raises(errors.RequestError):
            one.trace([{"role": "user", "content": "hi"}])  # no tokenizer, or no template


def colourless(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.campaign
def test_the_picture_has_every_step_and_no_markup_of_the_model(canvases, monkeypatch, capsys):
    trace = canvases.trace(canvas_engine.text(PROMPT), {"max_new_tokens": 24, "ignore_eos": True})
    lines = str(trace).splitlines()
    assert lines[0].startswith(f"24 tokens in {trace.meta_info['nfe']} forwards")
    assert lines[1] == "".join(trace.texts) == trace.text
    assert len(lines) == 3 + len(trace.steps)
    for step, line in zip(trace.steps, lines[3:], strict=True):
        cells = [t or trace_view.MASK for t in step.texts]
        assert line.split() == [str(step.number), f"+{len(step.decided)}", "".join(cells)]
    assert colourless(trace_view.terminal(trace, has_colours=True)) == str(trace)
    page = trace._repr_html_()
    assert re.sub(r"<[^>]+>", "", page).count(trace.text) == 2  # the answer, and the last step
    assert page.count("<span ") == 24 and page.count("<tr>") == len(trace.steps)
    # `show` writes it, with colours to a terminal only.
    trace.show()
    assert capsys.readouterr().out == str(trace)
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    trace.show()
    assert screen.getvalue() == trace_view.terminal(trace, has_colours=True) != str(trace)


@pytest.mark.campaign
def test_a_notebook_displays_it(canvases, monkeypatch):
    trace = canvases.trace(PROMPT, {"max_new_tokens": 4})
    displayed = []
    kernel = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(
        get_ipython=lambda: kernel, display=types.SimpleNamespace(display=displayed.append)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    trace.show()
    assert displayed == [trace]


def test_long_traces_have_fewer_lines_and_steps_without_a_decision_none():
    def step(number, decided):
        kind = answer_steps.Decision
        return answer_steps.Step(
            number=number,
            step=number,
            decided=tuple(
                kind(position=i, token_id=1, text="a", confidence=1.0, replaced=None)
                for i in decided
            ),
            token_ids=(),
            texts=(),
            num_final=0,
        )

    few = [step(1, [4]), step(2, []), step(3, [0, 2])]
    assert [(s.number, new) for s, new in trace_view._lines(few)] == [(1, {4}), (3, {0, 2})]
    many = [step(i + 1, [i]) for i in range(2 * trace_view.MAX_LINES + 1)]
    lines = list(trace_view._lines(many))
    assert len(lines) <= trace_view.MAX_LINES and lines[-1][0] is many[-1]
    assert sorted(i for _, new in lines for i in new) == list(range(len(many)))


def test_special_characters_are_shown_as_text():
    assert trace_view._escaped("<b>\n\x1b[31m") == f"&lt;b&gt;{trace_view.NEWLINE}·[31m"
