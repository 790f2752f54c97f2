"""Connections on which nothing, or nothing more, arrives are closed (real sockets)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support import edge, fake_engine, socket_server

LIMIT_S = 0.6
DRIP_S = 0.05
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "hi", "max_tokens": 8}).encode()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = edge.make_state(
        fake_engine.FakeEngine(block_s=LIMIT_S),
        timeout_read_request=LIMIT_S,
        timeout_keep_alive=LIMIT_S,
        api_key="key",
        max_body_bytes=10_000,
    )
    with socket_server.serving(server) as port:
        yield port


def drip(connection: socket.socket, part: bytes) -> None:
    """Sends `part` again and again until the other side has closed."""

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(part)
                time.sleep(DRIP_S)

    threading.Thread(target=send, daemon=True).start()


def head(length: int, key: str = "key") -> bytes:
    return HEAD + f"authorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("sent", "dripped", "status"),
    [
        pytest.param(b"", b"", None, id="nothing"),
        pytest.param(b"G", b"", 408, id="a letter"),
        pytest.param(HEAD, b"", 408, id="half a head"),
        pytest.param(HEAD, b"x-y: z\r\n", 408, id="a head without end"),
        pytest.param(head(1000), b"", 408, id="no body"),
        pytest.param(head(9000), b" ", 408, id="a body byte by byte"),
        pytest.param(
            HEAD + b"authorization: Bearer key\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1\r\n \r\n",
            408,
            id="chunks without end",
        ),
        pytest.param(head(9000, "wrong"), b" ", 401, id="the unread body of a refused request"),
    ],
)
def test_what_does_not_arrive_in_time_is_closed(port, sent, dripped, status):
    with socket_server.connect(port) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        if dripped:
            drip(connection, dripped)
        answer = socket_server.read_all(connection)
        assert time.monotonic() - began > LIMIT_S * 0.9
    found = int(answer.split(b" ", 2)[1]) if answer else None
    assert found == status
    if status == 408:
        assert b"connection: close" in answer.lower()
    if b"content-type: application/json" in answer and status == 408:
        assert "did not arrive" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_an_idle_connection_and_half_a_second_request_are_closed(port):
    for second in (b"", HEAD):
        with socket_server.connect(port) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + second)
            answer = socket_server.read_all(connection)
            assert answer.startswith(b"HTTP/1.1 200")


def test_a_slow_answer_is_waited_for(port):
    """Only what clients owe is timed: two blocks take twice the limit, a stream as well."""
    for stream in (False, True):
        body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
        with socket_server.connect(port) as connection:
            sent = head(len(body)) + body
            connection.sendall(sent[:-30])
            time.sleep(LIMIT_S / 2)
            connection.sendall(sent[-30:])
            answer = socket_server.read_all(connection)
        assert answer.startswith(b"HTTP/1.1 200")
        assert fake_engine.expected_text("hi", 8)[4:].encode() in answer


def test_many_requests_on_one_connection(port):
    with socket_server.connect(port) as connection:
        for _ in range(5):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while b'"status":"ok"' not in answer:
                part = connection.recv(65536)
                assert part
                answer += part
            time.sleep(LIMIT_S / 3)
