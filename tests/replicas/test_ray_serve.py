"""Two replicas of the bundled model on Ray Serve: one process each, and an ingress before them."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from support import ray_server

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray Serve is missing: pip install 'jdllm[ray]'")


@pytest.mark.skipif(HAS_RAY, reason="Ray Serve is there")
def test_without_ray_the_error_names_the_extra():
    for command in (
        ["-m", "jdllm.serve", "--replicas=2", "--port=0"],
        ["-c", "import jdllm.ray_app"],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert done.returncode != 0
        assert "pip install 'jdllm[ray]'" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def server():
    with ray_server.serving() as running:
        yield running


@needs_ray
@pytest.mark.campaign
class TestTwoReplicas:
    def test_both_answer_alike_whole_and_streamed(self, server):
        answers = [server.generate("Tom has 7 apples.").json() for _ in range(4)]
        assert {one["text"] for one in answers} == {answers[0]["text"]}
        frames = []
        body = ray_server.body("Tom has 7 apples.", stream=True)
        with server.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    frames.append(json.loads(line.removeprefix("data: ")))
        assert len(frames) > 1, "blocks come one by one"
        assert frames[-1]["text"] == answers[0]["text"]

    def test_errors_and_numbers_are_those_of_one_server(self, server):
        refused = server.generate("x" * 500)
        assert refused.status_code == 400
        assert "context length" in json.dumps(refused.json())
        assert server.http.get("/nowhere").status_code == 404
        names = sorted(server.replicas())
        text = server.http.get("/metrics").text
        for name in names:
            assert f'replica="{name}"' in text

    def test_a_client_that_leaves_frees_its_row(self, server):
        body = ray_server.body("Tom has 7 apples.", stream=True)
        with server.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        ray_server.wait_until(
            lambda: not any(one["num_running_reqs"] for one in server.replicas().values()), 60
        )

    def test_a_replica_is_killed_under_load(self, server):
        """Whole answers all come; others are right or end with an error; it comes back."""
        expected = server.generate("Tom has 7 apples.").json()["text"]
        before = server.replicas()
        victim = min(before)

        def ask(i: int) -> httpx.Response:
            return httpx.post(
                f"{server.url}/generate", json=ray_server.body("Tom has 7 apples."), timeout=180
            )

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, i) for i in range(24)]
            concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_COMPLETED)
            os.kill(before[victim]["pid"], signal.SIGKILL)
            answers = [one.result() for one in asked]
        assert [one.status_code for one in answers] == [200] * 24
        assert {one.json()["text"] for one in answers} == {expected}
        ray_server.wait_until(
            lambda: victim not in server.replicas() and len(server.replicas()) == 2,
            ray_server.START_S,
        )
        assert server.generate("Tom has 7 apples.").json()["text"] == expected

    def test_a_signal_ends_it_with_0(self, server):
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(timeout=120) == 0, "".join(server.log)


@needs_ray
@pytest.mark.long
def test_chaos():
    """Replicas are killed at random for minutes; every answer is right or a clear error."""
    with ray_server.serving() as running:
        done = subprocess.run(
            [sys.executable, "scripts/chaos_replicas.py", "--url", running.url, "--minutes", "4"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
