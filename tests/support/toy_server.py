"""An OpenAI-compatible server in a thread of this process, without a model behind it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading


class ToyServer(http.server.BaseHTTPRequestHandler):
    """Answers `#### <number of words>`, or what `texts` has for the prompt."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict]
    refuse: list[tuple[int, dict]]
    texts: dict[str, str]

    def do_GET(self):
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "toy"}]})
        elif self.path in ("/health", "/server_info"):
            self.reply(200, {"device": "toy device"})
        else:
            self.reply(404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuse:
            self.reply(*self.refuse.pop())
            return
        self.bodies.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        text = self.texts.get(prompt, f"#### {len(prompt.split())}")
        self.reply(
            200,
            {
                "choices": [{"message": {"content": text}, "text": text, "finish_reason": "stop"}],
                "usage": {"completion_tokens": 6, "dllm": {"nfe": 3, "tpf": 2.0}},
            },
        )

    def reply(self, status: int, content: dict):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving():
    """Yields the handler class of a running server: its `url`, and what it received."""
    handler = type("Handler", (ToyServer,), {"bodies": [], "refuse": [], "texts": {}})
    toy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=toy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    handler.url = f"http://127.0.0.1:{toy.server_address[1]}"
    try:
        yield handler
    finally:
        toy.shutdown()
        thread.join()
        toy.server_close()
