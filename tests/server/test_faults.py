"""An answer that ends by a fault says so, on every route, and is never an empty 200."""

from __future__ import annotations

import json

import pytest
from support import edge, fake_engine

from jdllm.engine import generations
from jdllm.scheduler import commits

FAULTY = [0, 253]
OPTIONS = {"max_new_tokens": 8}


class FaultyTokenizer(fake_engine.FakeTokenizer):
    def apply_chat_template(self, messages, **_):
        return list(FAULTY)


def asks(stream: bool):
    messages = [{"role": "user", "content": "hi"}]
    yield "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "stream": stream}
    yield "/v1/completions", {"prompt": FAULTY, "max_tokens": 8, "stream": stream}
    yield "/v1/completions", {"prompt": [FAULTY, [1]], "max_tokens": 8, "n": 2, "stream": stream}
    yield "/generate", {"input_ids": FAULTY, "sampling_params": OPTIONS, "stream": stream}
    yield "/generate", {"input_ids": [FAULTY, [1]], "sampling_params": OPTIONS, "stream": stream}


@pytest.mark.parametrize(("path", "body"), [*asks(stream=False)])
def test_a_whole_answer_is_500_and_says_why(path, body):
    engine = fake_engine.FakeEngine(tokenizer=FaultyTokenizer())
    response = edge.call(edge.make_state(engine), path, body)
    assert response.status_code == 500
    error = edge.error_of(response)
    assert fake_engine.FAULT in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert engine.open_requests == set()


@pytest.mark.parametrize(("path", "body"), [*asks(stream=True)])
def test_a_stream_ends_with_an_error_frame(path, body):
    engine = fake_engine.FakeEngine(tokenizer=FaultyTokenizer(), block_s=0.3)
    server = edge.make_state(engine)
    server.ping_interval_s = 0.01  # the headers are sent before the fault
    response = edge.call(server, path, body)
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert fake_engine.FAULT in error["message"]
    assert '"finish_reason":"' not in response.text
    assert engine.open_requests == set()


def test_only_a_fault_has_a_status():
    reason = commits.FinishReason(kind="abort", finished_len=0)
    assert generations.finish_dict(reason) == {"type": "abort", "message": "aborted"}
    reason = commits.FinishReason(kind="abort", finished_len=0, message="x" * 10**6)
    finish = generations.finish_dict(reason)
    assert finish["status_code"] == 500 and len(finish["message"]) < 1000
