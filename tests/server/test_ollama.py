"""Ollama's routes: texts, lines, statistics, refusals, all in Ollama's shapes.

The shapes are those that the `ollama` package (0.6.3) parses.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re

import pytest
from support import edge, fake_engine

from jdllm.server.ollama import request

CHAT = "/api/chat"
GENERATE = "/api/generate"
PROMPT = "<user>hi"
MESSAGES = [{"role": "user", "content": "hi"}]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
LOAD_OPTIONS = {
    "num_ctx": 4096,
    "num_gpu": 1,
    "num_thread": 2,
    "num_batch": 512,
    "num_keep": 4,
    "main_gpu": 0,
    "use_mmap": True,
    "numa": False,
    "low_vram": False,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "tfs_z": 1,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0,
    "min_p": 0.0,
}


class EndingEngine(fake_engine.FakeEngine):
    """Ends every answer in one way."""

    def __init__(self, finish):
        super().__init__()
        self._finish = finish

    def _generation(self, *arguments):
        made = super()._generation(*arguments)
        return dataclasses.replace(made, finish_reason=made.finish_reason and self._finish)


def chat(count=6, **fields):
    return {"model": "m", "messages": MESSAGES, "options": {"num_predict": count}} | fields


def generate(count=6, **fields):
    return {"model": "m", "prompt": "hi", "options": {"num_predict": count}} | fields


def lines(response) -> list[dict]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def text_of(route, answer) -> str:
    return answer["message"]["content"] if route == CHAT else answer["response"]


@pytest.mark.parametrize(("route", "body"), [(CHAT, chat()), (GENERATE, generate())])
def test_a_whole_answer(route, body):
    answer = edge.call(edge.make_state(), route, body | {"stream": False}).json()
    assert text_of(route, answer) == fake_engine.expected_text(PROMPT, 6)
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("m", True, "length")
    assert TIME.fullmatch(answer["created_at"])
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(PROMPT), 6)
    assert 0 < answer["eval_duration"] <= answer["total_duration"] < 60 * 10**9
    assert answer["dllm"]["nfe"] == 4


@pytest.mark.parametrize(("route", "body"), [(CHAT, chat(10)), (GENERATE, generate(10))])
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": None}])
def test_a_stream_is_the_default(route, body, stream):
    *parts, end = lines(edge.call(edge.make_state(), route, body | stream))
    text = fake_engine.expected_text(PROMPT, 10)
    assert [text_of(route, part) for part in parts] == [text[:4], text[4:8], text[8:]]
    assert all(part["done"] is False and "done_reason" not in part for part in parts)
    assert text_of(route, end) == ""
    assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "length", 10)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "error"),
    [({"type": "stop", "matched": 5}, None), ({"type": "abort", "message": "why"}, "why")],
)
def test_the_end_is_told(finish, error, stream):
    server = edge.make_state(EndingEngine(finish))
    response = edge.call(server, GENERATE, generate(4, stream=stream))
    end = lines(response)[-1] if stream else response.json()
    assert (end["done_reason"], end.get("error")) == (finish["type"], error)


def test_system_and_raw():
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine)
    edge.call(server, GENERATE, generate(system="be"))
    edge.call(server, GENERATE, generate(raw=True))
    assert engine.seen_prompts == [list(b"<system>be<user>hi"), list(b"hi")]


def test_a_suffix_asks_for_infilling():
    engine = fake_engine.FakeEngine(model_spec=fake_engine.FULL_ATTENTION_SPEC)
    answer = edge.call(edge.make_state(engine), GENERATE, generate(suffix="!", stream=False)).json()
    assert answer["response"] == fake_engine.expected_text("hi!", 6)
    assert (engine.seen_prompts, engine.seen_suffixes) == ([list(b"hi")], [list(b"!")])


def test_options_reach_the_engine():
    engine = fake_engine.FakeEngine()
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 3, "stop": ["x"]}
    options |= {"num_predict": 5, "dllm": {"threshold": 0.7}}
    edge.call(edge.make_state(engine), CHAT, chat(options=options))
    (params,) = engine.seen_params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 0.9)
    assert (params.seed, params.stop, params.max_new_tokens) == (3, ("x",), 5)
    assert params.dllm.threshold == 0.7


@pytest.mark.parametrize("limit", [None, -1, -2, -1.0, "", 600, 10**9, 600.0])
def test_without_a_limit_or_with_one_beyond_it_the_rest_of_the_context(limit):
    engine = fake_engine.FakeEngine()
    options = {"num_predict": limit}
    assert edge.call(edge.make_state(engine), CHAT, chat(options=options)).status_code == 200
    assert engine.seen_params[0].max_new_tokens == fake_engine.CONTEXT - len(PROMPT)


@pytest.mark.parametrize("penalty", [None, "", False, 1])
def test_a_window_is_nothing_without_a_penalty(penalty):
    options = {"repeat_penalty": penalty, "repeat_last_n": 3}
    assert edge.call(edge.make_state(), CHAT, chat(options=options)).status_code == 200


def test_a_seed_of_minus_one_is_no_seed():
    engine = fake_engine.FakeEngine()
    edge.call(edge.make_state(engine), CHAT, chat(options={"seed": -1, "num_predict": 4}))
    assert engine.seen_params[0].seed is None


@pytest.mark.parametrize("name", LOAD_OPTIONS)
def test_options_of_loading_change_nothing(name):
    body = chat(options={"num_predict": 6, name: LOAD_OPTIONS[name]}, keep_alive="5m", stream=False)
    answer = edge.call(edge.make_state(), CHAT, body).json()
    assert text_of(CHAT, answer) == fake_engine.expected_text(PROMPT, 6)


@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        (CHAT, chat(format="json"), "format"),
        (CHAT, chat(format={"type": "object"}), "format"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools"),
        (CHAT, chat(think=True), "think"),
        (CHAT, chat(messages=[{"role": "user", "content": "hi", "images": ["aa"]}]), "images"),
        (CHAT, chat(messages=[{"role": "nobody", "content": "hi"}]), "role"),
        (CHAT, chat(messages=[{"content": "hi"}]), "role"),
        (CHAT, chat(messages="hi"), "messages"),
        (CHAT, chat(messages=[{"role": "user", "content": ""}] * 8193), "messages"),
        (CHAT, chat(options={"bogus": 1}), "bogus"),
        (CHAT, chat(options={"return_logprob": True}), "return_logprob"),
        (CHAT, chat(options={"mirostat": 2}), "mirostat"),
        (CHAT, chat(options={"num_ctx": "big"}), "num_ctx"),
        (CHAT, chat(options={"temperature": "hot"}), "temperature"),
        (CHAT, chat(options={"repeat_penalty": "much"}), "repeat_penalty"),
        (CHAT, chat(options={"num_predict": 2.5}), "num_predict"),
        (CHAT, chat(options={"num_predict": -3}), "num_predict"),
        (CHAT, chat(options=[1]), "options"),
        (CHAT, chat(mood=1), "mood"),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 600}]), "messages"),
        (GENERATE, generate(template="{{ .Prompt }}"), "template"),
        (GENERATE, generate(context=[1, 2]), "context"),
        (GENERATE, generate(images=["aa"]), "images"),
        (GENERATE, generate(suffix="x"), "suffix"),
        (GENERATE, generate(raw=True, system="be"), "system"),
        (GENERATE, generate(prompt=5), "prompt"),
        (GENERATE, {"model": "m", "keep_alive": 0}, "keep_alive"),
        # Every line of a stream repeats the name of the model.
        (CHAT, chat(model="m" * 1025), "model"),
        (GENERATE, generate(model="m" * 1025), "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field_in_ollamas_shape(route, body, name, stream):
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), route, body | {"stream": stream})
    assert response.status_code == 400
    assert response.headers["content-length"] == str(len(response.content))
    (message,) = response.json().values()
    assert list(response.json()) == ["error"]
    assert name in message
    assert engine.seen_prompts == []


@pytest.mark.parametrize(
    ("status", "path", "options"),
    [
        (401, "/api/tags", {"api_key": "key"}),
        (404, "/api/pull", {}),
        (404, CHAT, {"strict_model_name": True}),
        (413, CHAT, {"max_body_bytes": 10}),
        (503, CHAT, {"ready": False}),
    ],
)
def test_errors_of_the_whole_server_have_the_shape(status, path, options):
    body = None if path == "/api/tags" else chat(model="another")
    response = edge.call(edge.make_state(**options), path, body)
    assert response.status_code == status
    assert list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)


def test_other_routes_keep_their_shape():
    edge.error_of(edge.call(edge.make_state(), "/v1/responses", {"input": 5}))


def test_a_late_fault_is_a_line():
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine)
    engine.tokenizer.encode = lambda text, **options: [0, 254]
    *parts, end = lines(edge.call(server, GENERATE, generate(raw=True)))
    assert parts
    assert end == {"error": "internal server error"}


def test_silence_is_filled_with_spaces():
    server = edge.make_state(fake_engine.FakeEngine(block_s=0.2))
    server.ping_interval_s = 0.01
    response = edge.call(server, CHAT, chat())
    assert response.text.startswith(" ")
    assert [line["done"] for line in lines(response)] == [False, False, True]


def test_programs_need_no_content_type_but_pages_do():
    raw = json.dumps(generate(stream=False)).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    server = edge.make_state()
    assert edge.call(server, GENERATE, raw=raw, headers=form).status_code == 200
    page = form | {"origin": "http://page.example"}
    response = edge.call(server, GENERATE, raw=raw, headers=page)
    assert response.status_code == 400
    assert "Content-Type" in response.json()["error"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {"model": "m"}),
        (GENERATE, {"model": "m", "prompt": "", "keep_alive": -1}),
        (CHAT, {"model": "m", "messages": []}),
    ],
)
def test_a_request_without_a_prompt_loads_what_is_loaded(route, body):
    answer = edge.call(edge.make_state(), route, body).json()
    assert (answer["done"], answer["done_reason"], text_of(route, answer)) == (True, "load", "")


def test_the_model_is_listed():
    server = edge.make_state(strict_model_name=True)
    (model,) = edge.call(server, "/api/tags").json()["models"]
    assert model["name"] == model["model"] == "fake-model:latest"
    assert datetime.datetime.fromisoformat(model["modified_at"]).tzinfo is not None
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    (running,) = edge.call(server, "/api/ps").json()["models"]
    assert running["context_length"] == fake_engine.CONTEXT
    # A client asks for what it has seen, and for what its user has typed.
    for name in ("fake-model:latest", "fake-model"):
        assert edge.call(server, CHAT, chat(model=name)).status_code == 200
        shown = edge.call(server, "/api/show", {"model": name}).json()
        assert shown["capabilities"] == ["completion"]
        assert shown["model_info"]["fake.context_length"] == fake_engine.CONTEXT
    assert edge.call(server, "/api/show", {"model": "another"}).status_code == 404
    assert edge.call(server, "/api/show", {}).status_code == 400


def test_a_full_attention_model_says_that_it_inserts():
    server = edge.make_state(fake_engine.FakeEngine(model_spec=fake_engine.FULL_ATTENTION_SPEC))
    shown = edge.call(server, "/api/show", {"name": "fake-model"}).json()
    assert shown["capabilities"] == ["completion", "insert"]


def test_the_version_is_a_version():
    assert re.fullmatch(
        r"\d+\.\d+\.\d+", edge.call(edge.make_state(), "/api/version").json()["version"]
    )


def test_history_with_calls_of_tools():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    body = chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    turn = request.chat_turn(body["messages"][0], "messages.0")
    function = {"name": "add", "arguments": '{"a":1}'}
    assert turn["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]


def test_a_value_out_of_range_has_ollamas_name():
    response = edge.call(edge.make_state(), CHAT, chat(options={"repeat_penalty": 1000}))
    assert response.status_code == 400
    assert response.json()["error"].startswith("repeat_penalty=1000 is outside")
