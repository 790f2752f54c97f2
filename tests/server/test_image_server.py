"""A real pipeline behind HTTP: the stock client, refusals, leaving clients, a server process.

One engine makes images in this process, in steps of up to two; the server process makes one at a
time. So each image that both make is the same with batching and without.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import jax
import numpy as np
import openai
import pytest
from PIL import Image
from support import edge, golden_images, image_engine, socket_server, waiting

from jdllm.server import lifecycle

SIZE = "96x96"
STEPS = {"num_inference_steps": 3}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = edge.make_state(image_engine.shared(), enable_metrics=True)
    with socket_server.serving(server) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return client_of(url)


class Process:
    """`python -m jdllm.serve` with the golden pipeline, without batching; `log` is what it says.

    `options` are added; there are as many virtual devices as `tp_size` says.
    """

    def __init__(self, **options):
        devices = options.get("tp_size", 1)
        flag = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
        xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        options = image_engine.OPTIONS | {"batching_max_size": 1, "port": 0} | options
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "jdllm.serve", *flags]
        environment = {**os.environ, "XLA_FLAGS": xla_flags}
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.popen.stderr), daemon=True).start()

    def wait_ready(self) -> str:
        def is_ready() -> bool:
            assert self.popen.poll() is None, "".join(self.log)
            return any(lifecycle.READY_LINE in line for line in self.log)

        waiting.wait_until(is_ready, 300)
        (found,) = re.findall(r"listening on (http://\S+);", "".join(self.log))
        return found


@contextlib.contextmanager
def running(**options) -> Iterator[Process]:
    one = Process(**options)
    try:
        one.url = one.wait_ready()
        yield one
    finally:
        one.popen.kill()
        one.popen.wait()


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with running() as one:
        yield one


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def pixels(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def made(client, prompt="a red bicycle", **options):
    extra = STEPS | options.pop("extra_body", {})
    return client.images.generate(prompt=prompt, model="golden", size=SIZE, extra_body=extra,
                                  **options)  # fmt: skip


def offline(seed, prompt="a red bicycle"):
    (image,) = image_engine.shared().generate(
        prompt, width=96, height=96, seed=seed, use_tqdm=False, **STEPS
    )
    return np.asarray(image)


def is_same(one, other):
    """Launches of other sizes round differently, which may move a pixel by one step."""
    return one.shape == other.shape and np.abs(one.astype(int) - other).max() <= 1


def test_images_of_a_seed_are_those_of_the_offline_interface(client):
    answer = made(client, n=2, extra_body={"seed": 11})
    assert [image.seed for image in answer.data] == [11, 12]
    for image in answer.data:
        assert is_same(pixels(image.b64_json), offline(image.seed))
    answer = made(client, n=2, extra_body={"seed": [12, 5]})
    assert is_same(pixels(answer.data[0].b64_json), offline(12))
    assert is_same(pixels(answer.data[1].b64_json), offline(5))
    assert answer.usage.output_tokens == 2 * 36 and answer.usage.input_tokens > 3


def test_a_url_holds_the_image(client):
    answer = made(client, response_format="url", extra_body={"seed": 11})
    found = httpx.get(answer.data[0].url)
    assert found.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(found.content))
    assert is_same(np.asarray(image), offline(11))
    assert image.text["seed"] == "11" and image.text["model"] == "golden"


def test_a_stream_has_previews_and_ends_with_the_image(client):
    *partial, last = made(client, stream=True, partial_images=2, extra_body={"seed": 11})
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert all(pixels(event.b64_json).shape == (96, 96, 3) for event in partial)
    assert last.type == "image_generation.completed"
    assert is_same(pixels(last.b64_json), offline(11))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("size", {"size": "100x96"}),
        ("size", {"size": "8192x8192"}),
        ("num_inference_steps", {"num_inference_steps": 1001}),
        ("true_cfg_scale", {"true_cfg_scale": 4.0}),
        ("negative_prompt", {"negative_prompt": "blurry"}),
        ("max_sequence_length", {"max_sequence_length": 513}),
        ("n", {"n": 11}),
        ("image", {"image": "data:image/png;base64,AAAA"}),
        ("num_frames", {"num_frames": 16}),
        ("priority", {"priority": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_fields_are_named(url, param, fields):
    response = httpx.post(f"{url}/v1/images/generations", json={"prompt": "a cat"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_client_that_leaves_ends_its_images_at_the_next_step(url):
    body = {"prompt": "a cat", "size": SIZE, "n": 2, "num_inference_steps": 1000}
    before = image_engine.shared().stats().denoising_steps_total
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/images/generations", json=body, timeout=0.3)
    waiting.wait_until(lambda: not image_engine.shared().stats().num_running_reqs)
    assert image_engine.shared().stats().denoising_steps_total - before < 1900


def test_an_abort_by_name(url):
    body = {"prompt": "a cat", "size": SIZE, "num_inference_steps": 1000, "rid": "mine"}
    answers = []

    def ask():
        answers.append(httpx.post(f"{url}/v1/images/generations", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    waiting.wait_until(lambda: bool(image_engine.shared().stats().num_running_reqs))
    assert httpx.post(f"{url}/abort_request", json={"rid": "min"}).json()["num_aborted"] == 0
    assert httpx.post(f"{url}/abort_request", json={"rid": "mine"}).json()["num_aborted"] == 1
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (400, "aborted")


def test_metrics_and_information(client, url, tmp_path):
    made(client)
    text = httpx.get(f"{url}/metrics").text
    for name in ("images_total", "denoising_steps_total", "batch_occupancy", "image_denoise"):
        assert name in text
    info = httpx.get(f"{url}/server_info").json()
    assert info["pipeline"] == "ZImagePipeline" and info["max_running_requests"] == 4
    assert httpx.get(f"{url}/model_info").json()["architectures"] == ["ZImagePipeline"]
    assert httpx.get(f"{url}/v1/loads").json()["loads"][0]["max_running_requests"] == 4
    assert httpx.post(f"{url}/flush_cache", params={"timeout": 10}).status_code == 200
    assert httpx.post(f"{url}/start_profile", json={}, timeout=60).status_code == 200
    assert httpx.post(f"{url}/stop_profile", timeout=60).status_code == 200


@pytest.mark.campaign
def test_the_start_of_a_process_is_told_in_a_few_lines(process):
    text = "".join(process.log)
    for part in (
        "model golden: ZImagePipeline, float32, makes images of 128x128",
        "denoising: 8 steps, guidance 0; up to 1 images in a step; compiled for 96x96",
        "captions ",
        f"{process.url} is ready; try this:",
    ):
        assert part in text, text
    (command,) = re.findall(r": (curl .+)$", text, re.MULTILINE)
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    address = next(word for word in words if word.startswith("http"))
    response = httpx.post(address, json=body | {"size": SIZE}, timeout=60)
    assert httpx.get(response.json()["data"][0]["url"]).status_code == 200


def test_images_without_batching_are_those_with_it(process, client):
    prompts = ("a red bicycle", golden_images.PROMPTS[2])
    for prompt in prompts:
        together = made(client, prompt, n=3, extra_body={"seed": 20})
        singly = made(client_of(process.url), prompt, n=3, extra_body={"seed": 20})
        for one, other in zip(together.data, singly.data, strict=True):
            assert is_same(pixels(one.b64_json), pixels(other.b64_json))
    assert not any("rows=2" in line for line in process.log), "no launch of two was compiled"


def test_a_process_answers_routes_of_text_by_name_and_ends_by_a_signal(process):
    assert httpx.get(f"{process.url}/health").status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{process.url}/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(timeout=60) == 0


@pytest.mark.campaign
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on virtual devices of a CPU")
def test_a_process_over_two_devices_makes_the_same_images(client):
    with running(tp_size=2) as process:
        info = httpx.get(f"{process.url}/server_info").json()
        assert info["tp_size"] == 2 and [one["id"] for one in info["devices"]] == [0, 1]
        assert info["kernels"]["all_reduce"].startswith("xla")
        split = made(client_of(process.url), n=2, extra_body={"seed": 20})
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(timeout=60) == 0
    whole = made(client, n=2, extra_body={"seed": 20})
    for one, other in zip(split.data, whole.data, strict=True):
        assert is_same(pixels(one.b64_json), pixels(other.b64_json))
