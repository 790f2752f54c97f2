"""Pages of other origins: preflight, answers, errors, and which origins may."""

from __future__ import annotations

import pytest
from support import edge

from jdllm import config
from jdllm.server import cli

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("phase", ["ready", "starting"])
def test_a_preflight_needs_no_key(phase):
    server = edge.make_state(ready=phase == "ready", api_key="secret")
    response = edge.call(server, CHAT, method="OPTIONS", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in response.headers


def test_answers_and_errors_can_be_read_by_a_page():
    server = edge.make_state(api_key="secret")
    refused = edge.call(server, "/v1/models", headers={"origin": PAGE})
    assert refused.status_code == 401
    key = {"authorization": "Bearer secret"}
    answered = edge.call(server, "/v1/models", headers={"origin": PAGE} | key)
    assert answered.status_code == 200
    server.loaded_engine.model_info = lambda: {}["missing"]
    fault = edge.call(server, "/model_info", headers={"origin": PAGE} | key)
    assert fault.status_code == 500
    for response in (refused, answered, fault):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(("origin", "is_allowed"), [(PAGE, True), ("https://other.example", False)])
def test_listed_origins_only(origin, is_allowed):
    server = edge.make_state(cors_allow_origins=f"http://localhost:3000, {PAGE}")
    preflight = edge.call(server, CHAT, method="OPTIONS", headers=PREFLIGHT | {"origin": origin})
    assert preflight.status_code == (200 if is_allowed else 400)
    plain = edge.call(server, "/v1/models", headers={"origin": origin})
    for response in (preflight, plain):
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (origin if is_allowed else None)


def test_the_flag_and_no_origin_at_all():
    assert config.ServerConfig().cors_origins() == ["*"]
    options = cli.parse(["--cors-allow-origins", "http://a, http://b"])
    assert options.server.cors_origins() == ["http://a", "http://b"]
    server = edge.make_state(cors_allow_origins="")
    assert edge.call(server, CHAT, method="OPTIONS", headers=PREFLIGHT).status_code == 405
