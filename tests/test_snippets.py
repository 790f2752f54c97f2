"""Every snippet of README and docs works with what the command above it started.

A real server process answers the snippets for a server; the offline ones run in this process, with
one engine for all that load the same model. Commands that install, that need a GPU or that download
a model do not run; `test_readme.py` checks their flags.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from support import snippets

import jdllm
from jdllm import decoding
from jdllm.server import lifecycle
from jdllm.tasks import example

START_S = 900.0  # beside another test run on two cores
# Few programs to compile; of the default model those of `engine/test_bundled_model.py`.
SHAPES = {
    None: {"max_running_requests": 2, "chunked_prefill_size": 64},
    "jdllm-nano-canvas": {"max_running_requests": 1},
}
URL = "http://127.0.0.1:30000"
CANVAS = "docs/algorithms.md"
CLIENTS = "docs/clients.md"
NOTEBOOKS = "docs/notebooks.md"
# Pages with Python, and how many snippets each has. Two are not run here, as their packages are no
# dependencies of the tests: Ollama's client, and lm-eval's table (`eval/test_eval_tasks.py`). Those
# about images name a published model; `server/test_image_server.py` makes the same calls.
PYTHON = {
    "README.md": 3,
    "docs/images.md": 2,
    "docs/evaluation.md": 1,
    CANVAS: 2,
    CLIENTS: 2,
    NOTEBOOKS: 2,
}
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


class Server:
    """A server as a page starts it, on a free port; `log` is what it says."""

    def __init__(self, words: tuple[str, ...]):
        assert words[:2] == ("jdllm", "serve")
        shapes = SHAPES[words[2] if words[2:] else None]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in shapes.items()]
        command = [sys.executable, "-m", "jdllm", *words[1:], "--port=0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not any(lifecycle.READY_LINE in line for line in self.log):
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.1)
        (self.url,) = re.findall(r"listening on (http://\S+);", "".join(self.log))

    def ask(self, text: str) -> dict:
        """Runs a shell snippet against this server and returns the JSON that it prints."""
        done = subprocess.run(
            ["bash", "-c", text.replace(URL, self.url)], capture_output=True, text=True, timeout=60
        )
        return json.loads(done.stdout)


@contextlib.contextmanager
def serving(page: str) -> Iterator[Server]:
    """Yields the server of the page's first command that serves a bundled model."""
    bundled = [words for words in snippets.commands([page]) if not any("/" in w for w in words)]
    server = Server(next(words for words in bundled if words[1] == "serve"))
    try:
        server.wait_ready()
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server():
    with serving("README.md") as found:
        yield found


@pytest.fixture(scope="module")
def llm():
    """Returns `jdllm.LLM`, but one engine per model, with few programs to compile."""
    made, kind = [], jdllm.LLM

    @functools.cache
    def make(model: str | None = None, **options: str) -> jdllm.LLM:
        made.append(kind(model=model, **SHAPES[model], **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def run(code: str, monkeypatch, capsys, llm=None) -> str:
    """Runs a Python snippet and returns what it prints."""
    if llm is not None:
        monkeypatch.setattr(jdllm, "LLM", llm)
    exec(compile(code, "snippet", "exec"), {})
    return capsys.readouterr().out


def answer(reply: dict) -> str | None:
    return example.extract_answer(reply["choices"][0]["message"]["content"])


def test_the_start_is_told_in_a_few_lines(server):
    text = "".join(server.log[: 1 + max(i for i, x in enumerate(server.log) if "ready to" in x)])
    lines = [
        line for line in text.splitlines() if "compiled " not in line and "weights:" not in line
    ]
    assert len(lines) <= 9, text
    assert lines[-1].endswith(lifecycle.READY_LINE)
    for part in (
        "model jdllm-nano: LLaDA2MoeModelLM, ",
        "decoding: LowConfidence (threshold ",
        "device cpu: cpu; kernels: ",
        " tokens, launch ",
        f"listening on {server.url}",
        f"{server.url} is ready; try this:",
    ):
        assert part in text
    assert "compiled " in text, "the slow part of the start is seen"
    for noise in ("option ", "tpu", "jax"):
        assert noise not in text


@needs_curl
def test_the_request_that_the_start_proposes_is_answered(server):
    (command,) = re.findall(r": (curl .+)$", "".join(server.log), re.MULTILINE)
    assert answer(server.ask(command)) == "12"


@needs_curl
def test_shell_snippets_of_the_readme_are_answered(server):
    asked = [text for text in snippets.blocks("README.md", "bash") if text.startswith("curl")]
    assert len(asked) == 1
    for text in asked:
        reply = server.ask(text)
        assert answer(reply) == "12"
        assert reply["usage"]["dllm"]["tpf"] > 1


def test_clients_of_the_readme_print_an_answer_and_its_cost(server, monkeypatch, capsys):
    clients = [text for text in snippets.blocks("README.md", "python") if "base_url" in text]
    assert len(clients) == 1
    for text in clients:
        printed = run(text.replace(URL, server.url), monkeypatch, capsys)
        assert "#### 5" in printed and "nfe" in printed


@needs_curl
def test_the_request_for_a_response_is_answered(server):
    (text,) = [text for text in snippets.blocks(CLIENTS, "bash") if text.startswith("curl")]
    (message,) = server.ask(text)["output"]
    assert example.extract_answer(message["content"][0]["text"]) == "12"


def test_the_client_of_the_responses_api_prints_an_answer_twice(server, monkeypatch, capsys):
    (text,) = [text for text in snippets.blocks(CLIENTS, "python") if "openai" in text]
    printed = run(text.replace(URL, server.url), monkeypatch, capsys)
    assert printed.count("#### 12") == 2


@pytest.mark.campaign  # by default the server is asked the same question
def test_the_offline_snippet_of_the_readme_prints_an_answer(llm, monkeypatch, capsys):
    blocks = snippets.blocks("README.md", "python")
    (install,) = [text for text in blocks if "%pip install" in text]
    assert [line for line in install.splitlines() if "REPOSITORY" not in line] == []
    (offline,) = [text for text in blocks if "base_url" not in text and text != install]
    assert "#### 12" in run(offline, monkeypatch, capsys, llm)


@pytest.mark.campaign
def test_the_rule_of_ones_own_writes_the_answer(llm, monkeypatch, capsys):
    (text,) = [one for one in snippets.blocks(CANVAS, "python") if "register" in one]
    try:
        assert "#### 12" in run(text, monkeypatch, capsys, llm)
    finally:
        decoding.unregister("LeftFirst")


@pytest.mark.campaign
def test_snippets_about_traces_and_sweeps_show_steps_and_a_table(llm, monkeypatch, capsys):
    trace, sweep = snippets.blocks(NOTEBOOKS, "python")
    printed = run(trace, monkeypatch, capsys, llm)
    assert " tokens in " in printed and "'<|role_end|>' " in printed
    monkeypatch.setattr(jdllm, "Engine", lambda: llm().engine)
    assert "| 0.9 | " in run(sweep, monkeypatch, capsys)


@pytest.mark.campaign
def test_snippets_about_infilling_fill_the_gap(llm, monkeypatch, capsys):
    (text,) = [one for one in snippets.blocks(CANVAS, "python") if "canvas" in one]
    gap, *whole = run(text, monkeypatch, capsys, llm).splitlines()
    assert "7+5=" in gap and "12" in gap
    assert whole == ["5 + 7 = <<5+7=12>>12", "#### 12"]


@pytest.mark.campaign
@needs_curl
def test_the_request_about_infilling_is_answered():
    (text,) = [text for text in snippets.blocks(CANVAS, "bash") if text.startswith("curl")]
    with serving(CANVAS) as server:
        gap = server.ask(text)["choices"][0]["text"]
    assert "7+5=" in gap and "12" in gap


def test_what_is_not_run_is_known():
    """A new snippet is run here, or is a command whose flags `test_readme.py` checks."""
    checked = ("jdllm ", "pip install ", "docker ", "kubectl ", "python scripts/")
    lm_eval = ("python -m jdllm.eval.lm_eval run ", "lm_eval run ")  # its own command line
    aup = ("python -m jdllm.eval.aup ",)  # `eval/test_aup.py` runs it
    for page in snippets.PAGES:
        assert len(snippets.blocks(page, "python")) == PYTHON.get(page, 0)
        for text in snippets.blocks(page, "bash"):
            others = [
                line
                for line in text.splitlines()
                if not line.startswith((*checked, *lm_eval, *aup))
            ]
            assert others == [] or text.startswith("curl "), page
