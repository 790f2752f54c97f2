"""A server process: start-up, leaving clients, signals, exit codes (fake engine)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from support import edge, stalls

from jdllm.server import lifecycle

PROGRAM = ("-m", "support.fake_server")
ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
LONG = {"prompt": "hi", "max_tokens": 400}
WAIT_S = 60.0


class Process:
    """A running server; its log is collected as it comes."""

    def __init__(self, *, drain_s: float = 10, block_s: float = 0.02, extra: tuple[str, ...] = ()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = (str(self.port), str(drain_s), str(block_s), *extra)
        command = [sys.executable, *PROGRAM, *options]
        self.popen = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=PATH
        )
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.popen.stderr), daemon=True).start()

    def wait_ready(self) -> None:
        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(self.url + "/health").status_code == 200
            return False

        wait_until(ready)

    def num_running(self) -> int:
        text = httpx.get(self.url + "/metrics").text
        line = next(x for x in text.splitlines() if x.startswith("jdllm:num_running_reqs{"))
        return int(float(line.rsplit(" ", 1)[1]))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def exit_code(self) -> int:
        return self.popen.wait(timeout=WAIT_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@contextlib.contextmanager
def running(**options) -> Iterator[Process]:
    process = Process(**options)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


@pytest.fixture(scope="module")
def shared() -> Iterator[Process]:
    with running() as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def slow() -> Iterator[Process]:
    """A server that takes longer for the answer to `LONG` than `wait_until` waits."""
    with running(block_s=3 * WAIT_S / (LONG["max_tokens"] / 4)) as process:
        process.wait_ready()
        yield process


def test_health_tells_the_start_and_the_ready_line_comes():
    with running() as process:
        seen = []

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                response = httpx.get(process.url + "/health")
                if response.status_code == 200:
                    return True
                seen.append(response.json())
            return False

        wait_until(ready)
        assert {body["status"] for body in seen} == {"starting"}
        compiling = [body for body in seen if body["phase"] == "compile"]
        assert compiling
        assert all(body["total"] == 4 for body in compiling)
        wait_until(lambda: any(lifecycle.READY_LINE in line for line in process.log))
        process.signal()
        assert process.exit_code() == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_leaving_client_frees_its_request(slow, path, stream):
    body = (
        LONG | {"stream": stream}
        if path != "/generate"
        else {"text": "hi", "sampling_params": {"max_new_tokens": 400, "n": 2}, "stream": stream}
    )
    assert slow.num_running() == 0
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_until(lambda: slow.num_running() == 1)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: slow.num_running() == 0)


def test_abort_ends_a_stream_with_its_reason(shared):
    body = LONG | {"stream": True, "rid": "abort-me"}
    with httpx.stream("POST", shared.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        reply = httpx.post(shared.url + "/abort_request", json={"rid": "abort-me"})
        assert reply.json()["num_aborted"] == 1
        data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "abort"


def test_a_real_413_for_a_body_without_length(shared):
    def chunks() -> Iterator[bytes]:
        for _ in range(90):
            yield b" " * 100_000

    headers = {"content-type": "application/json"}
    response = httpx.post(shared.url + "/v1/completions", content=chunks(), headers=headers)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    edge.error_of(response)
    assert httpx.get(shared.url + "/health").status_code == 200


def test_every_oversize_body_on_one_client_gets_its_413(shared):
    headers = {"content-type": "application/json"}
    body = b" " * 10_000_000
    with httpx.Client(base_url=shared.url) as client:
        for _ in range(20):
            response = client.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 413
            assert response.headers["connection"] == "close"


def test_accepted_connections_do_not_delay_small_replies():
    async def no_delay() -> int:
        accepted = asyncio.get_running_loop().create_future()

        def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = lifecycle.bind("127.0.0.1", 0)
        async with await asyncio.start_server(on_connection, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await accepted
            writer.close()
        return found

    assert asyncio.run(no_delay()) != 0


def test_the_drain_lets_a_stream_end_and_refuses_new_requests():
    with running(block_s=0.15) as process:
        process.wait_ready()
        body = {"prompt": "hi", "max_tokens": 80, "stream": True}
        with httpx.stream("POST", process.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.signal()
            wait_until(lambda: httpx.get(process.url + "/health").status_code == 503)
            refused = httpx.post(process.url + "/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.exit_code() == 0


@pytest.mark.campaign
def test_after_the_drain_time_the_rest_is_aborted_with_an_error():
    with running(drain_s=0.3, block_s=0.1) as process:
        process.wait_ready()
        answers = []
        plain = threading.Thread(
            target=lambda: answers.append(
                httpx.post(process.url + "/v1/completions", json=LONG, timeout=WAIT_S)
            )
        )
        plain.start()
        body = LONG | {"stream": True}
        with httpx.stream("POST", process.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            wait_until(lambda: process.num_running() == 2)
            process.signal(signal.SIGINT)
            data = [line for line in lines if line]
        plain.join()
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["error"]["type"] == "service_unavailable"
        assert answers[0].status_code == 503
        edge.error_of(answers[0])
        assert process.exit_code() == 0


@pytest.mark.campaign
def test_a_server_of_images_starts_drains_and_ends_alike():
    path = "/v1/images/generations"
    with running(drain_s=0.3, block_s=0.05, extra=("images",)) as process:
        process.wait_ready()
        assert httpx.post(process.url + path, json={"prompt": "a cat"}).status_code == 200
        body = {"prompt": "a cat", "num_inference_steps": 50, "stream": True, "partial_images": 1}
        with httpx.stream("POST", process.url + path, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert process.num_running() == 1
            process.signal()
            data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["error"]["type"] == "service_unavailable"
        assert process.exit_code() == 0
    log = "".join(process.log)
    assert lifecycle.READY_LINE in log and f"{process.url}{path}" in log


@pytest.mark.campaign
def test_a_second_signal_exits_at_once():
    with running(drain_s=60, block_s=0.5) as process:
        process.wait_ready()
        with httpx.stream("POST", process.url + "/generate", json={"text": "a", "stream": True}):
            process.signal()
            wait_until(lambda: httpx.get(process.url + "/health").status_code == 503)
            process.signal()
            assert process.exit_code() == 128 + signal.SIGTERM


@pytest.mark.campaign
def test_a_signal_while_loading_exits_0():
    with running() as process:
        wait_until(lambda: any("listening" in line for line in process.log))
        process.signal()
        assert process.exit_code() == 0


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("fail-config", 2, "error: the checkpoint is wrong\n"),
        pytest.param("fail", 1, "error: RuntimeError: out of memory\n", marks=pytest.mark.campaign),
    ],
)
def test_a_failed_start_says_so_and_exits(how, code, text):
    with running(extra=(how,)) as process:
        assert process.exit_code() == code
        wait_until(lambda: any(line.endswith(text) for line in process.log))
        assert ("Traceback" in "".join(process.log)) == (how == "fail")


def test_a_port_in_use_is_a_clear_error(shared):
    command = [sys.executable, *PROGRAM, str(shared.port), "1", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=PATH)
    assert done.returncode == 2
    assert f":{shared.port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def hostile() -> dict[str, tuple[str, dict, int]]:
    return {
        "4,096 prompts with 128 choices": (
            "/v1/completions",
            {"prompt": ["a"] * 4096, "n": 128},
            400,
        ),
        "a million prompts": ("/v1/completions", {"prompt": ["a"] * 10**6}, 400),
        "a long stop string": ("/v1/completions", {"prompt": "a", "stop": "a" * 2**20}, 400),
        "1.5 million texts": ("/tokenize", {"prompt": ["a"] * 1_500_000}, 400),
        "long texts": ("/tokenize", {"prompt": ["words " * 300_000] * 3}, 200),
        "many messages": ("/v1/chat/completions", {"messages": [{"role": "user"}] * 200_000}, 400),
        "a long key": ("/v1/completions", {"prompt": "a", "k" * 7_000_000: 1}, 400),
        "lists": ("/generate", {"text": [[]] * 2_000_000}, 400),
    }


@pytest.mark.campaign
def test_hostile_bodies_keep_neither_health_nor_a_client_waiting(shared):
    """All at once, twice. The client asks the same all the time and gets the same answer."""
    bodies = [(path, json.dumps(body), status) for path, body, status in hostile().values()] * 2
    headers = {"content-type": "application/json"}
    waits, answers, statuses = [], set(), []

    def attack(path: str, content: str) -> None:
        reply = httpx.post(shared.url + path, content=content, headers=headers, timeout=WAIT_S)
        statuses.append(reply.status_code)
        assert reply.status_code == 200 or len(reply.content) < 6000

    threads = [threading.Thread(target=attack, args=body[:2]) for body in bodies]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=shared.url, timeout=WAIT_S) as client:
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
            body = {"prompt": "hi", "max_tokens": 4}
            answers.add(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    assert sorted(statuses) == sorted(status for _, _, status in bodies)
    assert max(waits) < stalls.LONGEST_STALL_S
    assert len(answers) == 1
