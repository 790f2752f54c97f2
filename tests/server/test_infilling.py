"""`suffix` on /v1/completions: what stands between prompt and suffix, if a model sees both."""

from __future__ import annotations

import pytest
from support import edge, fake_engine

TEXT = "/v1/completions"
SUFFIX = "\n    return a\n"
BOS = 1


class BosTokenizer(fake_engine.FakeTokenizer):
    """Marks the beginning of a text, as many tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + super().encode(text)


def infilling_engine(**options):
    return fake_engine.FakeEngine(model_spec=fake_engine.FULL_ATTENTION_SPEC, **options)


def text(**fields):
    return {"model": "any", "prompt": "hi", "max_tokens": 6} | fields


def test_the_answer_is_what_stands_between_prompt_and_suffix():
    engine = infilling_engine()
    answer = edge.call(edge.make_state(engine), TEXT, text(suffix=SUFFIX)).json()
    assert engine.seen_prompts == [list(b"hi")]
    assert engine.seen_suffixes == [list(SUFFIX.encode())]
    # As in OpenAI's API neither prompt nor suffix comes back.
    (choice,) = answer["choices"]
    assert choice["text"] == fake_engine.expected_text("hi" + SUFFIX, 6)
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 2 + len(SUFFIX), "completion_tokens": 6}


def test_a_stream_gives_the_same_text():
    body = text(suffix=SUFFIX, stream=True, stream_options={"include_usage": True})
    *chunks, last = edge.frames(edge.call(edge.make_state(infilling_engine()), TEXT, body))
    shown = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert shown == fake_engine.expected_text("hi" + SUFFIX, 6)
    assert last["usage"]["prompt_tokens"] == 2 + len(SUFFIX)


def test_several_prompts_share_a_suffix():
    engine = infilling_engine()
    body = text(prompt=["a", "b"], suffix="z", n=2)
    answer = edge.call(edge.make_state(engine), TEXT, body).json()
    assert engine.seen_suffixes == [[122], [122]]
    assert [choice["text"] for choice in answer["choices"]] == [
        fake_engine.expected_text(prompt + "z", 6, choice) for prompt in "ab" for choice in (0, 1)
    ]
    assert answer["usage"]["prompt_tokens"] == 4


def test_nothing_marks_the_beginning_of_a_suffix():
    engine = infilling_engine(tokenizer=BosTokenizer())
    edge.call(edge.make_state(engine), TEXT, text(suffix="z"))
    assert (engine.seen_prompts, engine.seen_suffixes) == ([[BOS, *b"hi"]], [[122]])


@pytest.mark.parametrize("suffix", [None, ""])
@pytest.mark.parametrize("make_engine", [fake_engine.FakeEngine, infilling_engine])
def test_an_empty_suffix_is_none(make_engine, suffix):
    engine = make_engine()
    answer = edge.call(edge.make_state(engine), TEXT, text(suffix=suffix)).json()
    assert answer["choices"][0]["text"] == fake_engine.expected_text("hi", 6)
    assert engine.seen_suffixes == [[]]


@pytest.mark.parametrize(("prompt_len", "suffix_len", "limit"), [(2, 3, 16), (400, 100, 12)])
def test_without_max_tokens_sixteen_where_there_is_room(prompt_len, suffix_len, limit):
    engine = infilling_engine()
    body = text(prompt="p" * prompt_len, suffix="s" * suffix_len, max_tokens=None)
    edge.call(edge.make_state(engine), TEXT, body)
    assert [params.max_new_tokens for params in engine.seen_params] == [limit]


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_causal_model_refuses_it_by_name(stream):
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), TEXT, text(suffix="x", stream=stream))
    assert response.status_code == 400
    error = edge.error_of(response)
    assert (error["param"], error["type"]) == ("suffix", "invalid_request_error")
    assert engine.seen_prompts == []


@pytest.mark.parametrize("suffix", [5, ["a"], [1, 2], True])
def test_a_suffix_is_text(suffix):
    response = edge.call(edge.make_state(infilling_engine()), TEXT, text(suffix=suffix))
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == "suffix"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/generate", {"text": "hi"}),
    ],
)
def test_other_routes_have_no_suffix(path, body):
    response = edge.call(edge.make_state(infilling_engine()), path, body | {"suffix": "x"})
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == "suffix"


def test_a_suffix_counts_for_the_context():
    room = fake_engine.CONTEXT - len("hi") - len(SUFFIX)
    server = edge.make_state(infilling_engine())
    assert edge.call(server, TEXT, text(suffix=SUFFIX, max_tokens=room)).status_code == 200
    response = edge.call(server, TEXT, text(suffix=SUFFIX, max_tokens=room + 1))
    error = edge.error_of(response)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


def test_a_server_without_a_tokenizer_says_so():
    engine = infilling_engine(skip_tokenizer_init=True)
    response = edge.call(edge.make_state(engine), TEXT, text(prompt=[1, 2], suffix="x"))
    assert response.status_code == 400
    assert "skip-tokenizer-init" in edge.error_of(response)["message"]
