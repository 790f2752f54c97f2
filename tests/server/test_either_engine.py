"""One server for models that write text and models that make images; each route knows its kind."""

from __future__ import annotations

import dataclasses

import pytest
from support import edge, fake_engine, fake_images

from jdllm.server import app, lifecycle

TEXT_ROUTES = [
    (route.path, method)
    for router in app.TEXT_ROUTERS
    for route in router.routes
    for method in route.methods
]
PROMPT = {"prompt": "a cat"}


@pytest.fixture
def images():
    return edge.make_state(fake_images.FakeImageEngine())


@pytest.mark.parametrize(("path", "method"), TEXT_ROUTES)
def test_text_routes_say_that_the_model_makes_images(images, path, method):
    for raw in (b"{}", b"no json"):
        headers = {"content-type": "application/json"}
        response = edge.call(images, path, raw=raw, method=method, headers=headers)
        assert response.status_code == 400
        message = response.json()["error"]
        if not path.startswith("/api/"):  # where an error is its message alone
            error = edge.error_of(response)
            assert (error["param"], error["type"]) == ("model", "invalid_request_error")
            message = error["message"]
        assert "'fake-image' makes images" in message and "/v1/images/generations" in message


def test_there_are_text_routes():
    paths = {path for path, _ in TEXT_ROUTES}
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"}


@pytest.mark.parametrize("body", [PROMPT, {}, {"n": 99}])
def test_the_image_route_says_that_the_model_writes_text(body):
    response = edge.call(edge.make_state(), "/v1/images/generations", body)
    error = edge.error_of(response)
    assert (response.status_code, error["param"]) == (400, "model")
    assert "'fake-model' writes text" in error["message"]
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(("compiled", "asked"), [((32, 48), (32, 48)), (None, (64, 96))])
def test_the_probe_asks_for_an_image_that_needs_no_compilation(compiled, asked):
    facts = dataclasses.replace(fake_images.FACTS, compiled_size=compiled)
    engine = fake_images.FakeImageEngine(facts=facts)
    assert edge.call(edge.make_state(engine), "/health_generate").status_code == 200
    (seen,) = engine.seen
    assert (seen.height, seen.width) == asked


@pytest.mark.parametrize(
    ("engine", "makes"),
    [(fake_engine.FakeEngine(), "text"), (fake_images.FakeImageEngine(), "image")],
    ids=["text", "image"],
)
def test_the_card_tells_what_the_model_makes(engine, makes):
    server = edge.make_state(engine)
    (card,) = edge.call(server, "/v1/models").json()["data"]
    assert card["architecture"] == {"input_modalities": ["text"], "output_modalities": [makes]}
    assert ("max_model_len" in card) == (makes == "text")
    assert edge.call(server, f"/v1/models/{card['id']}").json() == card


def test_probes_and_information_of_an_image_model(images):
    for path in ("/health", "/ready", "/livez", "/health_generate", "/model_info", "/version"):
        assert edge.call(images, path).status_code == 200, path
    (probe,) = images.loaded_engine.seen
    assert probe.num_inference_steps == 1
    assert edge.call(images, "/server_info").json()["internal_states"] == [{}]
    assert edge.call(images, "/flush_cache", method="POST").status_code == 200
    assert edge.call(images, "/abort_request", {"abort_all": True}).json()["num_aborted"] == 0
    for path in ("/docs", "/openapi.json"):
        assert "embed_image_metadata" in edge.call(images, path).text
    images.loaded_engine.is_alive = False
    assert edge.call(images, "/health").status_code == 503


def test_loads_of_an_image_model(images):
    (load,) = edge.call(images, "/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["max_running_requests"]) == (0, 8)
    assert "token_usage" not in load and load["queues"] == {"waiting": 0}
    (old,) = edge.call(images, "/get_load").json()
    assert (old["num_reqs"], old["num_tokens"]) == (0, 0)
    prometheus = edge.call(images, "/v1/loads?format=prometheus").text
    assert 'sglang_max_running_requests{dp_rank="0"} 8' in prometheus


def test_the_first_request_is_of_the_right_kind():
    engine = fake_images.FakeImageEngine()
    lifecycle.warm_up(engine)
    assert engine.num_warm_ups == 1
    asked: list[dict] = []
    text = fake_engine.FakeEngine()
    text.generate = lambda **options: asked.append(options)
    lifecycle.warm_up(text)
    assert asked == [{"input_ids": list(b"Hello"), "sampling_params": {"max_new_tokens": 8}}]
