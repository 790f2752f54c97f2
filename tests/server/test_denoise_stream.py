"""`stream_mode: "denoise"` on the wire: frames between chunks, their texts, their rate."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support import edge, fake_engine

from jdllm.scheduler import batch, text_frames
from jdllm.server.openai import denoise_frames

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT = 6
ASK = {"stream": True, "max_tokens": COUNT, "dllm": {"stream_mode": "denoise"}}


class ShowingEngine(fake_engine.FakeEngine):
    """Writes a block from right to left, a token a step, if a request asks to see that."""

    def _generation(self, row, suffix, place, before, began):
        one = super()._generation(row, suffix, place, before, began)
        if not row[1].shows_steps:
            return one
        frames = []
        for step in range(1, len(one.delta_ids) + 1):
            hidden = len(one.delta_ids) - step
            frame = text_frames.TextFrame(
                start=before,
                token_ids=(*[None] * hidden, *one.delta_ids[hidden:]),
                logprobs=(*[None] * hidden, *[math.log(0.5)] * step),
                num_final=before + (0 if hidden else step),
            )
            frames.append(batch.Frame(step=step, value=frame))
        return dataclasses.replace(one, frames=tuple(frames))


def base(path):
    return {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}


def stream(path, **fields):
    server = edge.make_state(ShowingEngine())
    return edge.frames(edge.call(server, path, base(path) | ASK | fields))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_frames_stand_between_the_chunks_and_tell_the_text(path):
    parts = stream(path)
    frames = [part for part in parts if part["object"] == "jdllm.denoise"]
    chunks = [part for part in parts if part["object"] != "jdllm.denoise"]
    assert [(one["start"], one["step"]) for one in frames] == [
        (0, 1), (0, 2), (0, 3), (0, 4), (4, 1), (4, 2),
    ]  # fmt: skip
    assert {part["id"] for part in parts} == {frames[0]["id"]}
    text = []
    for frame in frames:
        assert (frame["choices"], frame["index"]) == ([], 0)
        text[frame["start"] :] = [one["text"] for one in frame["canvas"]]
    assert frames[0]["canvas"][0] == {"id": None, "text": "", "conf": None}
    last = frames[-1]["canvas"][-1]
    assert (chr(last["id"]), last["conf"]) == (last["text"], 0.5)
    pieces = [choice for part in chunks for choice in part["choices"]]
    key = (lambda one: one["delta"].get("content", "")) if path == CHAT else lambda one: one["text"]
    assert "".join(map(key, pieces)) == "".join(text)
    assert frames[-1]["committed"] == COUNT


def test_each_choice_has_its_own():
    frames = [part for part in stream(CHAT, n=2) if part["object"] == "jdllm.denoise"]
    assert [sum(one["index"] == i for one in frames) for i in (0, 1)] == [6, 6]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nobody_gets_them_unasked(path):
    for dllm in (None, {}, {"stream_mode": "block"}):
        assert all(part["object"] != "jdllm.denoise" for part in stream(path, dllm=dllm))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, base(CHAT) | {"dllm": ASK["dllm"]}),
        (TEXT, base(TEXT) | {"dllm": ASK["dllm"]}),
        ("/generate", {"text": "hi", "stream": True, "sampling_params": {"dllm": ASK["dllm"]}}),
        (CHAT, base(CHAT) | {"stream": True, "dllm": {"stream_mode": "words"}}),
    ],
)
def test_it_is_refused_by_name_where_nobody_would_see_it(path, body):
    response = edge.call(edge.make_state(ShowingEngine()), path, body)
    assert response.status_code == 400
    assert edge.error_of(response)["param"].endswith("dllm.stream_mode")


def frames_of(count):
    return [batch.Frame(step=step, value=None) for step in range(1, count + 1)]


def test_the_rate_is_bounded_and_the_last_frame_is_kept():
    now = 0.0
    thinning = denoise_frames.Thinning(lambda: now)
    shown = [one.step for one in thinning.keep(frames_of(denoise_frames.BURST))]
    assert shown == list(range(1, denoise_frames.BURST + 1))
    assert list(thinning.keep(frames_of(32))) == []
    assert [one.step for one in thinning.keep(frames_of(32), is_last=True)] == [32]
    count, seconds = 0, 10
    for _ in range(100 * seconds):
        now += 0.01
        kept = thinning.keep(frames_of(4))
        assert not kept or kept[-1].step == 4
        count += len(kept)
    assert (
        0.9 * denoise_frames.MAX_FRAMES_PER_S < count / seconds <= denoise_frames.MAX_FRAMES_PER_S
    )
    assert list(thinning.keep([])) == []
