"""However many connections somebody opens, others are served and no open file is missing."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from support import edge, fake_engine, socket_server, waiting

from jdllm.server import lifecycle
from jdllm.server.edge import open_files

MAX, AT_ONCE, MANY = 20, 4, 100
ROOT = pathlib.Path(__file__).resolve().parents[2]
FEW_FILES = 256
BODY = {"prompt": "hi", "max_tokens": 16}


@pytest.fixture
def port(monkeypatch) -> Iterator[int]:
    few = open_files.Limits(max_connections=MAX, accepted_at_once=AT_ONCE)
    monkeypatch.setattr(open_files, "limits", lambda: few)
    with socket_server.serving(edge.make_state(fake_engine.FakeEngine(block_s=0.1))) as port:
        yield port


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    found = [socket_server.connect(port) for _ in range(count)]
    try:
        yield found
    finally:
        for connection in found:
            connection.close()


def test_those_that_wait_longest_make_room(port):
    with idle_connections(port, MANY) as connections:
        waiting.wait_until(lambda: sum(map(is_closed, connections)) >= MANY - MAX)
        assert not any(map(is_closed, connections[-MAX // 2 :])), "the newest are kept"
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_a_kept_connection_waits_from_its_last_answer_on(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        client.get("/health")
        with idle_connections(port, MAX - 3) as older:
            httpx.get(f"http://127.0.0.1:{port}/health")  # comes after those
            assert client.get("/health").status_code == 200
            with idle_connections(port, MAX // 2):
                waiting.wait_until(lambda: sum(map(is_closed, older)) >= MAX // 2 - 2)
                (connection,) = client._transport._pool.connections
                assert client.get("/health").status_code == 200
                assert client._transport._pool.connections == [connection], "the same one"


def test_a_request_that_runs_is_no_idle_connection(port):
    body = BODY | {"stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body) as reply, idle_connections(port, MANY) as connections:
        waiting.wait_until(lambda: sum(map(is_closed, connections)) >= MANY - MAX)
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_a_process_with_few_open_files_serves_and_its_log_stays_short():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limited = ["sh", "-c", f'ulimit -n {FEW_FILES} && exec "$@"', "sh"]
    command = [*limited, sys.executable, "-m", "support.fake_server", str(port), "1", "0"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    log: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as server:
        try:
            reader = threading.Thread(target=lambda: log.extend(server.stderr))
            reader.start()
            waiting.wait_until(lambda: any(lifecycle.READY_LINE in line for line in log))
            with idle_connections(port, 2 * FEW_FILES):
                for _ in range(5):
                    reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=waiting.LIMIT_S)
                    assert reply.status_code == 200
        finally:
            server.kill()
            reader.join()
    assert len(log) < 100, "".join(log[:50])
    assert not any("Traceback" in line for line in log)


@pytest.mark.parametrize(
    ("soft", "hard", "is_refused", "left"),
    [
        pytest.param(1024, 1 << 20, False, 1 << 16, id="raised"),
        pytest.param(1024, resource.RLIM_INFINITY, False, 1 << 16, id="raised without end"),
        pytest.param(1024, 4096, False, 4096, id="as far as it goes"),
        pytest.param(1 << 20, 1 << 20, False, 1 << 20, id="not lowered"),
        pytest.param(resource.RLIM_INFINITY, resource.RLIM_INFINITY, False, 1 << 16, id="no limit"),
        pytest.param(1024, 1 << 20, True, 1024, id="refused"),
        pytest.param(64, 64, False, 64, id="small"),
    ],
)
def test_connections_stay_below_the_limit_of_open_files(monkeypatch, soft, hard, is_refused, left):
    now = [soft, hard]

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        if is_refused:
            raise ValueError("not allowed")
        now[:] = limits

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    found = open_files.limits()
    in_flight = open_files.ROUNDS * found.accepted_at_once
    assert 0 < found.max_connections <= left - in_flight - min(256, left // 4)
    assert found.max_connections >= left // 3
