"""The real server: `python -m jdllm.serve` with the bundled model, stock clients.

One process serves all tests here. The laws hold for any weights, so where the bundled
weights are absent (a source tree without them) random ones serve.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from support import compiling

from jdllm.checkpoint import source
from jdllm.server import lifecycle

pytestmark = pytest.mark.campaign  # what is compiled as users have it takes long to compile

START_S = 900.0  # beside another test run on two cores
CONTEXT = 512
FLAGS = (
    "--max-running-requests=4",
    f"--context-length={CONTEXT}",
    "--chunked-prefill-size=64",
    "--dllm-algorithm=LowConfidence,JointThreshold",
    "--enable-metrics",
    "--api-key=live-key",
    "--log-level-http=info",
)
HOT = 5.0  # sampled text is varied whatever the weights
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


class Live:
    """The running server and its clients."""

    def __init__(self, env: dict[str, str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        bundled = (source.bundled_model() / "model.safetensors").is_file()
        load = () if bundled else ("--load-format=dummy",)
        command = [sys.executable, "-m", "jdllm.serve", f"--port={port}", *FLAGS, *load]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.popen.stderr), daemon=True).start()
        headers = {"authorization": "Bearer live-key"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="live-key", max_retries=0)
        self.phases: list[str] = []

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, "".join(self.log)
            with contextlib.suppress(httpx.TransportError):
                response = self.http.get("/health")
                if response.status_code == 200:
                    return True
                self.phases.append(response.json()["phase"])
            return False

        wait_until(ready, START_S, every_s=0.2)

    def num_running(self) -> int:
        return self.http.get("/server_info").json()["internal_states"][0]["num_running_reqs"]

    def generate(self, text: str | list[str], **options) -> dict | list:
        options = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True} | options
        body = {"text": text, "sampling_params": options}
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def wait_until(condition: Callable[[], bool], limit_s: float, *, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(every_s)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Compiled as users have it."""
    server = Live(os.environ | {"XLA_FLAGS": compiling.flags_of_users()})
    try:
        server.wait_ready()
        yield server
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(timeout=30) == 0, "".join(server.log)
    finally:
        server.popen.kill()
        server.popen.wait()


def test_start_is_told(live):
    log = "".join(live.log)
    assert lifecycle.READY_LINE in log
    assert "model jdllm-nano: LLaDA2MoeModelLM, float32, context of 512 tokens" in log
    assert "decoding: LowConfidence (threshold 0.95); also JointThreshold" in log
    assert "Authorization: Bearer $API_KEY" in log, "the request to try has a place for the key"
    assert "live-key" not in log
    assert set(live.phases) <= {"load", "compile", "warmup", "ready"}
    assert "compile" in live.phases


def test_openai_chat(live):
    answer = live.openai.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=17,
        temperature=0,
        extra_body={"ignore_eos": True, "dllm": {"threshold": 0.8}},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 17
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 17
    dllm = answer.usage.model_extra["dllm"]
    assert dllm["nfe"] >= 1
    assert dllm["threshold"] == 0.8
    assert dllm["tpf"] == pytest.approx(17 / dllm["nfe"], abs=1e-3)
    ids = live.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert answer.usage.prompt_tokens == ids["count"]


@pytest.mark.parametrize("algorithm", ["LowConfidence", "JointThreshold"])
def test_a_chat_stream_says_what_the_plain_answer_says(live, algorithm):
    options = {
        "model": "any",
        "messages": MESSAGES,
        "max_completion_tokens": 70,
        "temperature": 0,
        "n": 2,
        "extra_body": {"dllm": {"algorithm": algorithm}, "ignore_eos": True},
    }
    plain = live.openai.chat.completions.create(**options)
    texts, ends, usage = {0: "", 1: ""}, {}, None
    stream = live.openai.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == {choice.index: choice.message.content for choice in plain.choices}
    assert ends == {0: "length", 1: "length"}
    assert usage.completion_tokens == plain.usage.completion_tokens == 140
    assert usage.model_extra["dllm"] == plain.usage.model_extra["dllm"]


def test_completions_of_several_prompts(live):
    prompts = ["One", "Two three"]
    answer = live.openai.completions.create(model="any", prompt=prompts, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        alone = live.openai.completions.create(model="any", prompt=prompt, temperature=0)
        assert alone.choices[0].text == choice.text
        ids = live.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        by_ids = live.openai.completions.create(model="any", prompt=ids, temperature=0)
        assert by_ids.choices[0].text == choice.text


def test_neighbours_do_not_change_an_answer(live):
    prompts = [f"Question {i}: how much is {i} and {i + 1}?" for i in range(6)]
    alone = [live.generate(prompt)["output_ids"] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: live.generate(prompt)["output_ids"], prompts))
    assert together == alone
    batch = live.generate(prompts)
    assert [reply["output_ids"] for reply in batch] == alone


def test_a_seed_repeats_and_seeds_differ(live):
    sampled = {"temperature": HOT, "max_new_tokens": 40}
    first, again, other = (
        live.generate("Once upon a time", seed=seed, **sampled)["output_ids"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_generate_stream_is_cumulative_and_counts(live):
    body = {
        "text": "Count with me",
        "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    with live.http.stream("POST", "/generate", json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert len(events) >= 2
    for before, after in zip(events, events[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert [e["meta_info"]["completion_tokens"] for e in events] == [
        len(e["output_ids"]) for e in events
    ]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    plain = live.generate("Count with me", max_new_tokens=300)
    assert plain["output_ids"] == events[-1]["output_ids"]
    assert plain["text"] == events[-1]["text"]


def test_a_stop_string_cuts_the_text(live):
    text = live.generate("Tell me more", max_new_tokens=60, temperature=HOT, seed=3)["text"]
    windows = [text[i : i + 3] for i in range(len(text) // 2, len(text) - 2)]
    stop = next(window for window in windows if window.isascii() and window.strip() == window)
    answer = live.openai.completions.create(
        model="any",
        prompt="Tell me more",
        max_tokens=60,
        temperature=HOT,
        seed=3,
        stop=[stop],
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.model_extra["matched_stop"] == stop
    assert choice.text == text[: text.index(stop)]


def test_a_leaving_client_frees_its_request(live):
    body = {"text": "Long", "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}
    with live.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: live.num_running() == 0, 60)
    assert live.http.post("/flush_cache?timeout=5").status_code == 200


def test_errors_reach_the_stock_client(live):
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai.chat.completions.create(model="any", messages=MESSAGES, tool_choice="required")
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai.completions.create(model="any", prompt="x", max_tokens=CONTEXT + 1)
    assert str(CONTEXT) in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai.completions.create(
            model="any", prompt="x", extra_body={"dllm": {"max_post_edit_steps": 3}}
        )
    assert caught.value.param == "dllm.max_post_edit_steps"
    with pytest.raises(openai.NotFoundError):
        live.openai.models.retrieve("another")
    with pytest.raises(openai.AuthenticationError):
        live.openai.with_options(api_key="wrong").models.list()
    assert httpx.get(live.url + "/health").status_code == 200


def test_every_api_gives_the_same_answer(live):
    """One question, greedily: chat, responses and Ollama, whole and in a stream."""
    chat = live.openai.chat.completions.create(model="any", messages=MESSAGES, max_tokens=24)
    text, count = chat.choices[0].message.content, chat.usage.completion_tokens
    answer = live.openai.responses.create(model="any", input=MESSAGES, max_output_tokens=24)
    assert (answer.output_text, answer.usage.output_tokens) == (text, count)
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    events = live.openai.responses.create(
        model="any", input=MESSAGES[0]["content"], max_output_tokens=24, stream=True
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    body = {"model": "any", "messages": MESSAGES, "options": {"num_predict": 24}}
    lines = live.http.post("/api/chat", json=body).text.splitlines()
    parts = [json.loads(line) for line in lines]
    assert "".join(part["message"]["content"] for part in parts) == text
    assert (parts[-1]["eval_count"], parts[-1]["done"]) == (count, True)
    without_key = httpx.post(live.url + "/api/chat", json=body)
    assert (without_key.status_code, list(without_key.json())) == (401, ["error"])


def test_information(live):
    (model,) = live.openai.models.list().data
    assert live.openai.models.retrieve(model.id).model_extra["max_model_len"] == CONTEXT
    info = live.http.get("/model_info").json()
    assert info["served_model_name"] == model.id
    assert info["context_length"] == CONTEXT
    assert live.http.get("/health_generate").status_code == 200
    server_info = live.http.get("/server_info").json()
    assert server_info["max_running_requests"] == 4
    assert "api_key" not in server_info


def test_metrics_and_no_compile_after_start(live):
    live.generate("warm", max_new_tokens=5)
    lines = live.http.get("/metrics").text.splitlines()
    values = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in lines if "model_name" in line}
    assert float(values["jdllm:jit_compiles_total"]) == 0
    assert float(values["jdllm:generation_tokens_total"]) >= 5
    assert float(values["jdllm:dllm_denoising_steps_total"]) >= 1
    assert float(values["jdllm:e2e_request_latency_seconds_count"]) >= 1
    assert any('"POST /generate" 200' in line for line in live.log)
