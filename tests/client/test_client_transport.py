"""The client against a server that does what a test says, byte for byte."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time

import pytest

from jdllm import errors
from jdllm.client import failures, transport

WAIT_S = 30.0


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers with (status, headers, chunks of the body); it waits for an event among them."""

    script: tuple[int, dict[str, str], list[bytes | threading.Event]]
    seen: list[tuple[str, str, bytes, dict[str, str]]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, body, dict(self.headers)))
        status, headers, chunks = self.script
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for chunk in chunks:
            if isinstance(chunk, threading.Event):
                chunk.wait(WAIT_S)
            else:
                self.wfile.write(chunk)
                self.wfile.flush()

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Scripted,), {"script": (200, {}, [b"{}"]), "seen": []})
    toy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=toy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    handler.url = f"http://127.0.0.1:{toy.server_address[1]}"
    yield handler
    toy.shutdown()
    thread.join()
    toy.server_close()


def client(server, suffix="", **options):
    return transport.Client(server.url + suffix, **{"timeout_s": WAIT_S} | options)


STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}


def test_json_goes_there_and_back(server):
    server.script = (200, {}, [b'{"a": 1}'])
    found = client(server, "/v1/", headers={"Authorization": "Bearer k"}).json(
        "POST", "/v1/models", {"text": "ä"}
    )
    assert found == {"a": 1}
    ((method, path, body, headers),) = server.seen
    assert (method, path, body) == ("POST", "/v1/models", '{"text":"ä"}'.encode())
    assert headers["Authorization"] == "Bearer k"
    assert headers["Content-Type"] == "application/json"


def test_a_path_before_the_routes_is_kept(server):
    assert client(server, "/prefix/v1").text("GET", "/health") == "{}"
    assert server.seen[0][:2] == ("GET", "/prefix/health")


def test_events_come_one_by_one_with_their_time(server):
    go_on, began = threading.Event(), time.perf_counter()
    frames = [b'data: {"i"', b": 0}\n", b'\n: ping\n\n\ndata: {"i": 1}\n\n', go_on, b"data: [DO"]
    server.script = (200, STREAM, [*frames, b"NE]\n\ndata: never parsed\n"])
    events = client(server).events("/generate", {})
    (first_s, first), (second_s, second) = next(events), next(events)
    assert (first, second) == ({"i": 0}, {"i": 1})
    assert began < first_s <= second_s < time.perf_counter()
    go_on.set()
    assert list(events) == []


def test_an_answer_that_is_no_stream_is_one_event(server):
    server.script = (200, {"Content-Type": "application/json"}, [b'{"a": 1}'])
    assert [event for _, event in client(server).events("/generate", {})] == [{"a": 1}]


def test_a_stream_that_breaks_off_is_a_failure(server):
    server.script = (200, STREAM, [b'data: {"i": 0}\n\n'])
    events = client(server).events("/generate", {})
    assert next(events)[1] == {"i": 0}
    with pytest.raises(failures.NoConnection, match=r"/generate: .* without \[DONE\]"):
        next(events)


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("tomorrow", None), (None, None)])
def test_a_status_is_a_refusal_with_its_text(server, header, seconds):
    headers = {} if header is None else {"Retry-After": header}
    server.script = (503, headers, [b"x" * 9999])
    for call in (
        lambda: client(server).json("POST", "/generate", {}),
        lambda: next(client(server).events("/generate", {})),
    ):
        with pytest.raises(failures.Refused, match="/generate answers 503: x+$") as raised:
            call()
        assert (raised.value.status, raised.value.retry_after_s) == (503, seconds)
        assert len(str(raised.value)) < transport.MAX_ERROR_CHARS + 50


def test_what_is_not_json_is_a_bad_answer(server):
    server.script = (200, {}, [b"<html>"])
    with pytest.raises(failures.BadAnswer, match="/model_info sent what is not JSON: b'<html>'"):
        client(server).json("GET", "/model_info")


def test_silence_is_a_failure(server):
    go_on = threading.Event()
    server.script = (200, STREAM, [b'data: {"i": 0}\n\n', go_on])
    events = client(server, timeout_s=0.2).events("/generate", {})
    next(events)
    with pytest.raises(failures.NoConnection, match="timed out"):
        next(events)
    go_on.set()


def test_nobody_there():
    with pytest.raises(failures.NoConnection, match="/health of http://127.0.0.1:9: .*refused"):
        transport.Client("http://127.0.0.1:9", timeout_s=WAIT_S).text("GET", "/health")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://"])
def test_an_address_is_checked(url):
    with pytest.raises(errors.ConfigError, match="must look like http://127.0.0.1:30000"):
        transport.Client(url, timeout_s=1.0)


@pytest.mark.parametrize(
    ("uses_proxies", "host", "is_asked"),
    [(True, "far.invalid", True), (False, "far.invalid", False), (True, "127.0.0.1", False)],
)
def test_a_proxy_is_for_other_machines_and_only_on_request(
    server, monkeypatch, uses_proxies, host, is_asked
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    one = transport.Client(f"http://{host}:9", timeout_s=WAIT_S, uses_proxies=uses_proxies)
    with contextlib.nullcontext() if is_asked else pytest.raises(failures.NoConnection):
        one.text("GET", "/health")
    assert [path for _, path, *_ in server.seen] == [f"http://{host}:9/health"] * is_asked
