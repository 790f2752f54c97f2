"""Lines of event streams, retries, bodies and answers, without a server."""

from __future__ import annotations

import pytest

from jdllm.client import api, failures, retries, sse

STREAM = b': note\ndata: {"a": 1}\r\n\n\n\nevent: x\ndata:{"b": "\xc3\xa4"}\n\ndata: [DONE]\n\nrest'


def test_the_cut_of_a_stream_into_chunks_changes_nothing():
    for size in (1, 2, 7, len(STREAM)):
        chunks = [(i, STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
        found = list(sse.payloads(chunks))
        assert [content for _, content in found] == [
            b'{"a": 1}', b'{"b": "\xc3\xa4"}', sse.DONE,
        ]  # fmt: skip
        for at, content in found:  # marked by the chunk in which its line ends
            end = STREAM.index(b"\n", STREAM.index(content))
            assert at <= end < at + size


class Flaky:
    """Fails with each of `outcomes` in turn, then returns "fine"."""

    def __init__(self, *outcomes):
        self.outcomes, self.calls = list(outcomes), 0

    def __call__(self):
        self.calls += 1
        if self.outcomes:
            raise self.outcomes.pop(0)
        return "fine"


@pytest.fixture
def naps(monkeypatch):
    """Pauses pass at once, on the clock of the retries too."""
    taken = []
    monkeypatch.setattr(retries.time, "sleep", taken.append)
    monkeypatch.setattr(retries.time, "monotonic", lambda: sum(taken))
    return taken


def refused(status, retry_after_s=None):
    return failures.Refused("no", status=status, retry_after_s=retry_after_s)


def test_an_unavailable_server_is_asked_again(naps):
    call = Flaky(refused(503), refused(503, 7.0))
    assert retries.Retries(pause_s=1.0).call(call) == "fine"
    assert (call.calls, naps) == (3, [1.0, 1.0])


def test_the_server_says_how_long_to_wait(naps):
    call = Flaky(refused(503), refused(503, 7.0), refused(503, 0.0))
    assert retries.Retries(pause_s=1.0, obeys_server=True).call(call) == "fine"
    assert naps == [1.0, 7.0, 0.0]


def test_attempts_and_time_have_an_end(naps):
    call = Flaky(*[refused(503)] * 9)
    with pytest.raises(failures.Refused):
        retries.Retries(pause_s=1.0, max_attempts=4).call(call)
    assert (call.calls, naps) == (4, [1.0] * 3)
    naps.clear()
    call = Flaky(*[refused(503)] * 9)
    with pytest.raises(failures.Refused):
        retries.Retries(pause_s=1.0, timeout_s=2.5).call(call)
    assert (call.calls, naps) == (4, [1.0] * 3)


@pytest.mark.parametrize(
    ("failure", "when_absent", "calls"),
    [
        (refused(400), True, 1),
        (failures.BadAnswer("no JSON"), True, 1),
        (failures.NoConnection("nobody"), False, 1),
        (failures.NoConnection("nobody"), True, 2),
        (refused(503), False, 2),
    ],
)
def test_other_failures_are_final(naps, failure, when_absent, calls):
    call, again = Flaky(failure), retries.Retries(pause_s=1.0, when_absent=when_absent)
    if calls == 1:
        with pytest.raises(failures.CallFailed):
            again.call(call)
    else:
        assert again.call(call) == "fine"
    assert call.calls == calls


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "content", "wanted"),
    [
        ("generate", "hi", {"text": "hi"}),
        ("generate", [1, 2], {"input_ids": [1, 2]}),
        ("completions", "hi", {"prompt": "hi"}),
        ("completions", [1, 2], {"prompt": [1, 2]}),
        ("chat", "hi", {"messages": MESSAGES}),
        ("chat", MESSAGES, {"messages": MESSAGES}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies(kind, content, wanted, stream):
    sampling = {"temperature": 0.0}
    found = api.body(kind, content, sampling, model="m", max_tokens=7, stream=stream)
    if kind == "generate":
        wanted = wanted | {"sampling_params": sampling | {"max_new_tokens": 7}}
    else:
        wanted = wanted | sampling | {"model": "m", "max_tokens": 7}
        if stream:
            wanted["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    assert found == wanted | {"stream": stream}


def usage(tokens):
    dllm = {"nfe": 2 * tokens, "blocks": tokens}
    details = {"cached_tokens": 3}
    return {"prompt_tokens": 5, "completion_tokens": tokens, "dllm": dllm,
            "prompt_tokens_details": details}  # fmt: skip


def native(text, tokens, reason):
    meta = usage(tokens) | {"cached_tokens": 3, "finish_reason": reason}
    return {"text": text, "meta_info": meta}


def chunk(text, tokens, reason, name="delta"):
    choice = {"text": text, name: {"content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": usage(tokens)}


ANSWERS = {
    "generate": [native("ab", 2, None), native("abc", 3, {"type": "stop", "matched": 4})],
    "completions": [chunk("ab", 2, None), chunk("c", 3, "stop"), {"choices": []}],
    "chat": [chunk("ab", 2, None), chunk("c", 3, "stop"), {"choices": []}],
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_adds_up(kind):
    answer, seen = api.Answer(kind), []
    for event in ANSWERS[kind]:
        answer.add(event)
        seen.append((answer.tokens, answer.finish_reason))
    assert seen[:2] == [(2, None), (3, "stop")] and set(seen[2:]) <= {(3, "stop")}
    assert (answer.text, answer.completion_tokens, answer.prompt_tokens) == ("abc", 3, 5)
    assert (answer.nfe, answer.blocks, answer.cached_tokens) == (6, 3, 3)


def test_a_whole_chat_answer_is_an_answer():
    answer = api.Answer("chat")
    answer.add(chunk("abc", 3, "length", name="message"))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("abc", 3, "length")


def test_without_counts_a_piece_is_a_token():
    answer = api.Answer("chat")
    for text, tokens in (("ab", 1), ("", 1), ("c", 2)):
        answer.add({"choices": [{"delta": {"content": text}}]})
        assert answer.tokens == tokens
    assert (answer.completion_tokens, answer.nfe, answer.finish_reason) == (None, None, None)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"error": {"message": "too long"}}, "the server answers .*too long"),
        ([], r"the server answers \[\]"),
        (native("", 0, {"type": "abort", "message": "gone"}), "aborted the request: gone"),
    ],
)
def test_an_error_as_an_event_is_raised(event, words):
    with pytest.raises(failures.BadAnswer, match=words):
        api.Answer("generate").add(event)
