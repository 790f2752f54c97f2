"""Every bad request is answered in OpenAI's error shape, by name, and never served."""

from __future__ import annotations

import json

import pytest
from support import edge, fake_engine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GEN = "/generate"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return {"model": "any", "messages": MESSAGES, "max_tokens": 4} | fields


def text(**fields):
    return {"model": "any", "prompt": "hi", "max_tokens": 4} | fields


def gen(**fields):
    return {"text": "hi", "sampling_params": {"max_new_tokens": 4}} | fields


BAD_FIELDS = [
    (CHAT, chat(frequency_penalty=2.5), "frequency_penalty"),
    (CHAT, chat(presence_penalty="1"), "presence_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(logprobs=3), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(allowed_token_ids=[]), "allowed_token_ids"),
    (CHAT, chat(bad_words="x"), "bad_words"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(regex="a+"), "regex"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (CHAT, chat(min_p=1.1), "min_p"),
    (CHAT, chat(user=5), "user"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n="2"), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=4.5), "max_tokens"),
    (CHAT, chat(max_completion_tokens=9), "max_completion_tokens"),
    (CHAT, chat(max_tokens=None, max_completion_tokens=-1), "max_completion_tokens"),
    (CHAT, chat(temperature=-1), "temperature"),
    (CHAT, chat(temperature="0"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=-1), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(seed=1.5), "seed"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop=[""]), "stop"),
    (CHAT, chat(stop=["a"] * 33), "stop"),
    (CHAT, chat(stop_token_ids=["a"]), "stop_token_ids.0"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(ignore_eos="yes"), "ignore_eos"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), "stream_options.usage"),
    (CHAT, chat(rid="r" * 257), "rid"),
    (CHAT, chat(dllm={"treshold": 0.5}), "dllm.treshold"),
    (CHAT, chat(dllm={"threshold": 2}), "dllm.threshold"),
    (CHAT, chat(dllm={"algorithm": "Nope"}), "dllm.algorithm"),
    (CHAT, chat(dllm=3), "dllm"),
    (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{{ x }}"}),
        "chat_template_kwargs.chat_template",
    ),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, {"model": "any"}, "messages"),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), "messages.0.content"),
    (CHAT, chat(messages=[*MESSAGES, {"role": "user", "content": []}]), "messages.1.content"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages.0.content.0",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        "messages.0.content.0.text",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "name": 5}]), "messages.0.name"),
    (TEXT, text(echo=5), "echo"),
    (TEXT, text(echo=True, logprobs=2), "echo"),
    (CHAT, chat(echo=True), "echo"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(best_of=3), "best_of"),
    (TEXT, text(logprobs=6), "logprobs"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(top_logprobs=1), "top_logprobs"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=["a", 5]), "prompt"),
    (TEXT, text(prompt=[[1], []]), "prompt"),
    (TEXT, text(prompt=[True]), "prompt"),
    (TEXT, text(prompt=[999]), "prompt"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(max_completion_tokens=4), "max_completion_tokens"),
    (GEN, gen(input_ids=[1]), "text"),
    (GEN, {"sampling_params": {}}, "text"),
    (GEN, gen(text=5), "text"),
    (GEN, {"input_ids": [[1], "a"]}, "input_ids"),
    (GEN, {"input_ids": []}, "input_ids"),
    (GEN, {"input_ids": [256]}, "input_ids"),
    (GEN, gen(lora_path="x"), "lora_path"),
    (GEN, gen(rid=["a", "b"]), "rid"),
    (GEN, gen(rid=[[]]), "rid"),
    (GEN, gen(sampling_params=[{}, {}]), "sampling_params"),
    (GEN, gen(sampling_params=5), "sampling_params"),
    (GEN, gen(sampling_params=[5]), "sampling_params"),
    (GEN, gen(sampling_params={"stop": 5}), "stop"),
    (GEN, gen(sampling_params={"n": 0}), "n"),
    (GEN, gen(sampling_params={"max_new_tokens": 4, "max_tokens": 5}), "max_tokens"),
    (GEN, gen(sampling_params={"regex": "a"}), "regex"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": ""}, "rid"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/generate", {"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ("/generate", {"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    BAD_FIELDS,
    ids=[f"{p[1:]}-{q}-{i}" for i, (p, _, q) in enumerate(BAD_FIELDS)],
)
def test_bad_field_is_400_and_named(path, body, param):
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), path, body)
    assert response.status_code == 400, response.text
    error = edge.error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert engine.seen_prompts == []


def test_unknown_field_is_named_with_the_nearest_match():
    error = edge.error_of(edge.call(edge.make_state(), CHAT, chat(temprature=0)))
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]
    error = edge.error_of(edge.call(edge.make_state(), GEN, gen(sampling_params={"temprature": 0})))
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize(
    ("raw", "content_type"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[1]", "application/json"),
        (b'"x"', "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b"[" * 5000, "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded"),
    ],
)
def test_bad_body_is_400(raw, content_type):
    response = edge.call(edge.make_state(), TEXT, raw=raw, headers={"content-type": content_type})
    assert response.status_code == 400, response.text
    edge.error_of(response)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(n=1e300)),
        (TEXT, text(n=1e300, prompt=["a", "b"])),
        (TEXT, text(best_of=1e300)),
        (TEXT, text(prompt=[1e300])),
        ("/generate", gen(text=None, input_ids=[[1, 1e300]])),
        ("/detokenize", {"tokens": [1e300]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": -1e300}),
    ],
)
def test_a_huge_float_is_quoted_within_a_line(path, body):
    response = edge.call(edge.make_state(), path, body)
    assert response.status_code == 400
    assert "<an integer of 99" in edge.error_of(response)["message"]


def test_huge_integers_are_400():
    raw = json.dumps(text(seed=2**70)).encode()
    response = edge.call(
        edge.make_state(), TEXT, raw=raw, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == "seed"


def test_unknown_path_and_method():
    response = edge.call(edge.make_state(), "/v1/nothing")
    assert response.status_code == 404
    edge.error_of(response)
    response = edge.call(edge.make_state(), CHAT)
    assert response.status_code == 405
    edge.error_of(response)
    assert response.headers["allow"] == "POST"
    for path, allowed in ((GEN, "POST, PUT"), ("/flush_cache", "GET, HEAD, POST")):
        response = edge.call(edge.make_state(), path, method="DELETE")
        assert response.status_code == 405
        assert response.headers["allow"] == allowed


def test_unknown_model():
    response = edge.call(edge.make_state(), "/v1/models/other/model")
    assert response.status_code == 404
    error = edge.error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert edge.call(edge.make_state(), CHAT, chat()).status_code == 200
    strict = edge.make_state(strict_model_name=True)
    assert edge.error_of(edge.call(strict, CHAT, chat()))["code"] == "model_not_found"
    assert edge.call(strict, TEXT, text()).status_code == 404
    assert edge.call(strict, CHAT, chat(model="fake-model")).status_code == 200
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [104]})):
        assert edge.call(strict, path, body).status_code == 200
        assert edge.call(strict, path, body | {"model": "other"}).status_code == 404


def test_body_over_the_limit_is_413_declared_or_chunked():
    server = edge.make_state(max_body_bytes=1000)
    big = json.dumps(text(prompt="x" * 2000)).encode()
    json_type = {"content-type": "application/json"}
    declared = edge.call(server, TEXT, raw=big, headers=json_type)
    assert declared.status_code == 413
    edge.error_of(declared)

    async def chunks():
        for i in range(0, len(big), 100):
            yield big[i : i + 100]

    chunked = edge.call(server, TEXT, raw=chunks(), headers=json_type)
    assert chunked.status_code == 413
    edge.error_of(chunked)
    assert edge.call(server, TEXT, text()).status_code == 200


def test_api_key():
    server = edge.make_state(api_key="secret", enable_metrics=True)
    bearer = lambda key: {"authorization": f"Bearer {key}"}  # noqa: E731
    for headers in (
        None,
        bearer("wrong"),
        bearer(""),
        bearer("sécret"),
        {"authorization": "secret"},
    ):
        if headers is not None:
            headers = {k: v.encode() for k, v in headers.items()}
        response = edge.call(server, CHAT, chat(), headers=headers)
        assert response.status_code == 401
        assert edge.error_of(response)["type"] == "authentication_error"
    assert edge.call(server, "/v1/models").status_code == 401
    assert edge.call(server, "/docs").status_code == 401
    assert edge.call(server, CHAT, chat(), headers=bearer("secret")).status_code == 200
    for path in ("/health", "/ready", "/readyz", "/livez", "/ping", "/metrics"):
        assert edge.call(server, path).status_code == 200
    assert edge.call(server, "/health_generate").status_code == 401  # it uses the device
    assert edge.call(server, "/health_generate", headers=bearer("secret")).status_code == 200
    assert edge.call(server, CHAT, method="OPTIONS").status_code == 405


def test_admin_key():
    server = edge.make_state(api_key="user", admin_api_key="admin")
    bearer = lambda key: {"authorization": f"Bearer {key}"}  # noqa: E731
    abort_all = {"abort_all": True}
    assert edge.call(server, "/flush_cache").status_code == 401
    assert edge.call(server, "/flush_cache", headers=bearer("user")).status_code == 403
    assert edge.call(server, "/flush_cache", headers=bearer("admin")).status_code == 200
    response = edge.call(server, "/abort_request", abort_all, headers=bearer("user"))
    assert response.status_code == 403
    edge.error_of(response)
    assert edge.call(server, "/abort_request", abort_all, headers=bearer("admin")).is_success
    assert edge.call(server, "/abort_request", {"rid": "x"}, headers=bearer("user")).is_success
    only_admin = edge.make_state(admin_api_key="admin")
    assert edge.call(only_admin, CHAT, chat()).status_code == 200
    assert edge.call(only_admin, "/flush_cache").status_code == 401


def test_starting_and_draining_answer_503_with_retry_after():
    for phase in ("starting", "draining"):
        server = edge.make_state(ready=phase != "starting")
        server.phase = phase
        server.progress.enter("compile", total=4)
        for path in (CHAT, TEXT, GEN):
            response = edge.call(server, path, {})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert edge.error_of(response)["code"] == phase
        assert edge.call(server, "/v1/models").status_code == 503
        health = edge.call(server, "/health")
        assert health.status_code == 503
        assert health.json()["status"] == phase
        assert edge.call(server, "/ready").status_code == 503
    starting = edge.make_state(ready=False)
    starting.progress.enter("compile", total=4)
    body = edge.call(starting, "/health").json()
    assert body == {"status": "starting", "phase": "compile", "done": 0, "total": 4, "eta_s": None}


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_are_http_errors(stream):
    full = edge.make_state(fake_engine.FakeEngine(max_queued=0))
    response = edge.call(full, CHAT, chat(stream=stream))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert edge.error_of(response)["message"] == "The request queue is full."
    response = edge.call(edge.make_state(), TEXT, text(max_tokens=600, stream=stream))
    assert response.status_code == 400
    assert edge.error_of(response)["code"] == "context_length_exceeded"


def test_a_fault_is_500_without_its_detail():
    for stream in (False, True):
        response = edge.call(edge.make_state(), TEXT, text(prompt=[0, 255], stream=stream))
        assert response.status_code == 500
        assert "secret" not in response.text
        assert edge.error_of(response)["type"] == "server_error"


def test_a_fault_outside_the_engine_is_500_in_the_same_shape():
    server = edge.make_state()
    server.loaded_engine.model_info = lambda: {}["missing"]
    response = edge.call(server, "/model_info")
    assert response.status_code == 500
    assert "missing" not in response.text
    edge.error_of(response)


def test_without_a_template_or_tokenizer():
    bare = fake_engine.FakeEngine(tokenizer=fake_engine.FakeTokenizer(has_chat_template=False))
    response = edge.call(edge.make_state(bare), CHAT, chat())
    assert response.status_code == 400
    assert "--chat-template" in edge.error_of(response)["message"]
    none = edge.make_state(fake_engine.FakeEngine(skip_tokenizer_init=True))
    for path, body in (
        (CHAT, chat()),
        (TEXT, text()),
        (GEN, gen()),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = edge.call(none, path, body)
        assert response.status_code == 400
        assert "skip-tokenizer-init" in edge.error_of(response)["message"]
    assert edge.call(none, GEN, {"input_ids": [5], "sampling_params": {}}).status_code == 200


def test_metrics_and_flush_refusals():
    response = edge.call(edge.make_state(), "/metrics")
    assert response.status_code == 404
    edge.error_of(response)
    for timeout in ("abc", "-1", "nan"):
        response = edge.call(edge.make_state(), f"/flush_cache?timeout={timeout}")
        assert response.status_code == 400
        assert edge.error_of(response)["param"] == "timeout"
    busy = fake_engine.FakeEngine()
    busy.open_requests.add("r")
    assert edge.call(edge.make_state(busy), "/flush_cache?timeout=0.1").status_code == 400
