"""POST /v1/images/generations: pictures, files, metadata, URLs, events, and what ends them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import math
import re

import httpx
import numpy as np
import pytest
from PIL import Image
from support import edge, fake_images

from jdllm import version
from jdllm.options import config
from jdllm.server import app

PATH = "/v1/images/generations"
H, W, STEPS = 64, 96, 4  # the fake pipeline's defaults
JPEG_ERROR = 6.0  # mean difference of a smooth picture with halved colour resolution


def server_of(*, facts=fake_images.FACTS, **options):
    engine = fake_images.FakeImageEngine(facts=facts)
    return edge.make_state(engine, **options), engine


def ask(server, **fields) -> httpx.Response:
    return edge.call(server, PATH, {"prompt": "a cat"} | fields)


def picture(entry) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(entry["b64_json"])))


def test_the_defaults_are_the_pipelines():
    server, engine = server_of()
    response = ask(server, seed=7)
    assert response.status_code == 200
    body = response.json()
    (entry,) = body["data"]
    found = picture(entry)
    assert found.format == "PNG"
    assert np.array_equal(np.asarray(found), fake_images.painted(H, W, 7, STEPS))
    assert body["id"].startswith("img-") and body["model"] == "fake-image"
    assert (body["size"], body["output_format"], body["background"]) == ("96x64", "png", "opaque")
    assert (entry["seed"], entry["num_inference_steps"]) == (7, STEPS)
    assert entry["revised_prompt"] is None and "url" not in entry
    assert entry["timings"] == fake_images.TIMES
    assert body["inference_time_s"] == 3.5  # without the time in the queue
    assert body["peak_memory_mb"] == fake_images.PEAK_MEMORY_MB
    assert entry["file_path"] is None, "SGLang's name; no files are written"
    assert body["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"text_tokens": 2, "image_tokens": 0, "truncated_tokens": 0},
        "output_tokens": 24,
        "output_tokens_details": {"image_tokens": 24, "text_tokens": 0},
        "total_tokens": 26,
        "num_inference_steps": STEPS,
        "num_skipped_steps": 0,
    }
    assert not engine.open_requests


class SkippingEngine(fake_images.FakeImageEngine):
    """Says that image i of a request has skipped i + 1 steps."""

    def _events(self, request, name, index, step):
        events = super()._events(request, name, index, step)
        return [dataclasses.replace(event, skipped_steps=index + 1) for event in events]


def test_usage_tells_how_many_steps_were_skipped():
    engine = SkippingEngine(facts=dataclasses.replace(fake_images.FACTS, has_step_cache=True))
    body = ask(edge.make_state(engine), n=2, residual_diff_threshold=0.25).json()
    assert [one.residual_diff_threshold for one in engine.seen] == [0.25, 0.25]
    assert [entry["num_skipped_steps"] for entry in body["data"]] == [1, 2]
    assert body["usage"]["num_skipped_steps"] == 3
    assert body["usage"]["num_inference_steps"] == 2 * STEPS
    assert picture(body["data"][0]).text["residual_diff_threshold"] == "0.25"
    inner = {"diffusers_kwargs": {"residual_diff_threshold": 0.5}}
    assert ask(edge.make_state(engine), **inner).status_code == 200
    assert engine.seen[-1].residual_diff_threshold == 0.5


def test_options_reach_the_engine_from_every_place():
    server, engine = server_of()
    options = {
        "num_inference_steps": 3, "guidance_scale": 2, "negative_prompt": "fog",
        "cfg_truncation": 0.5, "cfg_normalization": True, "max_sequence_length": 16,
    }  # fmt: skip
    ask(server, size="32x48", **options)
    ask(server, width=32, height=48, **options)
    ask(server, diffusers_kwargs=options | {"width": 32, "height": 48, "output_type": "pil"})
    ask(server, size="32x48", width=32, diffusers_kwargs=options, guidance_scale=2.0)
    assert len(engine.seen) == 4
    for one in engine.seen:
        assert (one.width, one.height, one.num_inference_steps) == (32, 48, 3)
        assert (one.guidance_scale, one.negative_prompt, one.cfg_truncation) == (2.0, "fog", 0.5)
        assert (one.cfg_normalization, one.max_sequence_length) == (1.0, 16)


@pytest.mark.parametrize(
    ("seed", "seeds"), [(7, [7, 8, 9]), ([5, 1, 5], [5, 1, 5])], ids=["first", "list"]
)
def test_n_images_have_a_seed_each(seed, seeds):
    server, _ = server_of()
    body = ask(server, n=3, seed=seed).json()
    assert [entry["seed"] for entry in body["data"]] == seeds
    for entry in body["data"]:
        expected = fake_images.painted(H, W, entry["seed"], STEPS)
        assert np.array_equal(np.asarray(picture(entry)), expected)
    assert body["usage"]["input_tokens"] == 2 and body["usage"]["output_tokens"] == 72


def test_a_seed_that_was_drawn_makes_the_image_again():
    server, _ = server_of()
    first = ask(server).json()["data"][0]
    again = ask(server, seed=first["seed"]).json()["data"][0]
    assert again["b64_json"] == first["b64_json"]


def test_a_prompt_that_was_cut_is_told():
    server, _ = server_of()
    details = ask(server, prompt="a " * 40).json()["usage"]["input_tokens_details"]
    assert (details["text_tokens"], details["truncated_tokens"]) == (32, 8)


@pytest.mark.parametrize(("name", "kind"), [("jpeg", "JPEG"), ("jpg", "JPEG"), ("webp", "WEBP")])
def test_other_formats(name, kind):
    server, _ = server_of()
    body = ask(server, seed=0, output_format=name).json()
    found = picture(body["data"][0])
    assert found.format == kind and body["output_format"] == kind.lower()
    gap = np.asarray(found, float) - fake_images.painted(H, W, 0, STEPS)
    assert np.abs(gap).mean() < JPEG_ERROR
    sizes = [
        len(
            ask(server, seed=0, output_format=name, output_compression=q).json()["data"][0][
                "b64_json"
            ]
        )
        for q in (0, 50, 99)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    best = ask(server, seed=0, output_format=name, output_compression=100).json()["data"][0]
    assert best["b64_json"] == body["data"][0]["b64_json"], "the default"


def test_a_png_tells_how_it_was_made_unless_told_not_to():
    server, _ = server_of()
    prompt = "naïve 猫\n\0 \N{GRINNING FACE}" + "x" * 500
    options = {"prompt": prompt, "seed": 7, "guidance_scale": 1.5, "negative_prompt": "fog"}
    found = picture(ask(server, **options).json()["data"][0])
    assert found.text == {
        "prompt": prompt.replace("\0", "\N{REPLACEMENT CHARACTER}"),
        "negative_prompt": "fog",
        "seed": "7",
        "num_inference_steps": "4",
        "guidance_scale": "1.5",
        "cfg_truncation": "1.0",
        "cfg_normalization": "0.0",
        "max_sequence_length": "32",
        "model": "fake-image",
        "Software": f"jdllm {version.__version__}",
    }
    bare = picture(ask(server, **options, embed_image_metadata=False).json()["data"][0])
    assert bare.text == {}
    assert np.array_equal(np.asarray(bare), np.asarray(found))


@pytest.mark.parametrize("prompt", ["", " ", "\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_prompt_makes_an_image(prompt, stream):
    server, engine = server_of()
    response = ask(server, prompt=prompt, seed=7, stream=stream)
    assert response.status_code == 200, response.text
    (entry,) = events_of(response) if stream else response.json()["data"]
    assert engine.seen[0].prompt == prompt
    assert np.array_equal(np.asarray(picture(entry)), fake_images.painted(H, W, 7, STEPS))
    assert picture(entry).text["prompt"] == prompt


def test_the_scale_of_a_negative_prompt_is_told_where_there_is_one():
    server, _ = server_of(facts=fake_images.FLUX_FACTS)
    guided = {"negative_prompt": "fog", "true_cfg_scale": 2.5}
    entry = ask(server, **guided).json()["data"][0]
    assert entry["true_cfg_scale"] == 2.5
    assert picture(entry).text["true_cfg_scale"] == "2.5"
    entry = ask(server).json()["data"][0]
    assert "true_cfg_scale" not in entry
    assert "true_cfg_scale" not in picture(entry).text


def test_a_url_leads_to_the_image_until_it_is_dropped():
    server, _ = server_of()
    headers = {"host": "images.example:8080"}
    body = edge.call(
        server, PATH, {"prompt": "a cat", "n": 2, "seed": 3, "response_format": "url"},
        headers=headers,
    ).json()  # fmt: skip
    assert all("b64_json" not in entry for entry in body["data"])
    for entry in body["data"]:
        base, path = entry["url"][:27], entry["url"][27:]
        assert base == "http://images.example:8080/" and path.endswith("/content")
        response = edge.call(server, "/" + path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "image/png"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-content-type-options"] == "nosniff"
        found = np.asarray(Image.open(io.BytesIO(response.content)))
        assert np.array_equal(found, fake_images.painted(H, W, entry["seed"], STEPS))
    server.image_store = type(server.image_store)(max_images=1)
    gone = edge.call(server, "/" + path)
    assert gone.status_code == 404 and edge.error_of(gone)["code"] == "not_found"


@pytest.mark.parametrize("path", ["x", "..", "img-" + "A" * 32, "%00", "a%2fb", "é" * 3000])
def test_no_other_path_leads_to_an_image(path):
    server, _ = server_of()
    ask(server, response_format="url")
    assert edge.call(server, f"/v1/images/{path}/content").status_code == 404


def events_of(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        if "type" in event:
            assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_stream_shows_previews_and_then_the_image():
    server, _ = server_of()
    events = events_of(ask(server, seed=7, stream=True, partial_images=2))
    assert [event["type"] for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    for place, event in enumerate(events[:2]):
        assert event["partial_image_index"] == place
        expected = fake_images.painted(H, W, 7, place + 1)
        assert np.array_equal(np.asarray(picture(event)), expected)
        assert picture(event).text == {}
    last = events[-1]
    assert np.array_equal(np.asarray(picture(last)), fake_images.painted(H, W, 7, STEPS))
    assert last["usage"]["total_tokens"] == 26 and last["seed"] == 7
    assert "partial_image_index" not in last


def test_a_stream_of_several_images_counts_the_prompt_once():
    server, _ = server_of()
    events = events_of(ask(server, n=3, seed=0, stream=True, partial_images=1))
    assert [event["image_index"] for event in events] == [0, 1, 2, 0, 1, 2]
    assert sum(event["usage"]["input_tokens"] for event in events[3:]) == 2
    assert sum(event["usage"]["output_tokens"] for event in events[3:]) == 72


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_an_image_ends_the_answer(stream):
    server, engine = server_of()
    response = ask(server, prompt=fake_images.FAULT, n=2, stream=stream, partial_images=stream + 0)
    if stream:
        error = events_of_fault(response)
    else:
        assert response.status_code == 500
        error = edge.error_of(response)
    assert fake_images.FAULT_TEXT in error["message"] and error["type"] == "server_error"
    assert not engine.open_requests


def events_of_fault(response: httpx.Response) -> dict:
    assert response.status_code == 200
    *before, last, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "") and before
    return json.loads(last.removeprefix("data: "))["error"]


@pytest.mark.parametrize("prompt", [fake_images.CRASH, fake_images.LATE_CRASH])
def test_a_fault_of_the_engine_tells_no_detail(prompt):
    server, engine = server_of()
    response = ask(server, prompt=prompt)
    assert response.status_code == 500 and "secret" not in response.text
    late = ask(server, prompt=fake_images.LATE_CRASH, stream=True, partial_images=1)
    assert events_of_fault(late)["code"] == "internal_error" and "secret" not in late.text
    assert not engine.open_requests


def test_a_full_queue_is_told_before_anything_runs():
    engine = fake_images.FakeImageEngine(max_queued=2)
    server = edge.make_state(engine)
    for stream in (False, True):
        response = ask(server, n=3, stream=stream)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert ask(server, n=2).status_code == 200 and len(engine.seen) == 2
    small = edge.make_state(engine, max_choices_per_request=1)
    response = ask(small, n=2)
    assert (response.status_code, edge.error_of(response)["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_can_be_aborted_by_its_name(stream):
    engine = fake_images.FakeImageEngine(step_s=0.05)
    server = edge.make_state(engine)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app.create_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a cat", "rid": "mine", "n": 2, "num_inference_steps": 50,
                    "stream": stream, "partial_images": 1 if stream else 0}  # fmt: skip
            answer = asyncio.create_task(client.post(PATH, json=body))
            while not engine.open_requests:
                await asyncio.sleep(0.01)
            assert engine.open_requests == {"mine-0", "mine-1"}
            twice = await client.post(PATH, json=body | {"stream": False, "partial_images": 0})
            assert (twice.status_code, edge.error_of(twice)["param"]) == (400, "rid")
            await asyncio.sleep(0.1)
            done = await client.post("/abort_request", json={"rid": "mine-1"})
            assert done.json()["num_aborted"] == 1
            return await answer

    response = asyncio.run(run())
    error = events_of_fault(response) if stream else edge.error_of(response)
    assert response.status_code == (200 if stream else 400)
    assert error["code"] == "aborted"
    assert not engine.open_requests


def test_a_priority_reaches_the_engine_or_is_refused():
    on = config.EngineConfig(enable_priority_scheduling=True)
    engine = fake_images.FakeImageEngine(engine_config=on)
    for priority in (5, None):
        assert ask(edge.make_state(engine), priority=priority).status_code == 200
    assert engine.seen_priorities == [-5, math.inf]
    server, _ = server_of()
    response = ask(server, priority=1)
    assert (response.status_code, edge.error_of(response)["param"]) == (400, "priority")


def test_metrics_and_the_log_tell_of_images(caplog):
    caplog.set_level("INFO")
    server, _ = server_of(enable_metrics=True)
    ask(server, n=2, rid="two")
    url = ask(server, response_format="url").json()["data"][0]["url"]
    edge.call(server, url.removeprefix("http://test"))
    edge.call(server, "/v1/images/nonsense/content")
    text = edge.call(server, "/metrics").text
    samples = dict(re.findall(r"^(jdllm:\w+\{[^}]*\}) ([\d.e+]+)$", text, re.MULTILINE))
    model = '{model_name="fake-image"}'
    assert samples[f"jdllm:image_steps_sum{model}"] == str(3.0 * STEPS)
    assert samples[f"jdllm:image_denoise_seconds_sum{model}"] == "6.0"
    assert samples[f"jdllm:e2e_request_latency_seconds_count{model}"] == "3.0"
    assert samples[f"jdllm:images_total{model}"] == "3.0"
    fetched = 'jdllm:http_requests_total{endpoint="/v1/images/{id}/content",method="GET"} 2.0'
    assert fetched in text
    assert "Finish: rid=two-1, reason=final, prompt=2" in caplog.text
