"""Pages of other origins: preflight, answers, errors, and which origins may."""

from __future__ import annotations

import pytest
from support import edge, fake_engine

from jdllm.options import config
from jdllm.server import cli, middleware

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


@pytest.mark.parametrize("path", sorted(middleware.ADMIN_PATHS))
@pytest.mark.parametrize("origins", ["*", PAGE])
def test_admin_routes_have_no_cors(path, origins):
    server = edge.make_state(cors_allow_origins=origins)
    preflight = edge.call(server, path, method="OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code == 405
    simple = edge.call(server, path, method="POST", headers={"origin": PAGE})
    assert simple.status_code == 403
    for response in (preflight, simple):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("keys", [{}, {"api_key": "k"}, {"admin_api_key": "k"}])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "http://test:81"},
        {"sec-fetch-site": "cross-site"},  # an image or a form: no Origin, no preflight
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_cannot_flush_or_abort_all(headers, keys):
    """With keys as well: a browser may hold them."""
    engine = fake_engine.FakeEngine()
    engine.open_requests.add("r")
    server = edge.make_state(engine, **keys)
    headers = headers | {"authorization": "Bearer k"}
    for method in ("GET", "POST"):
        assert edge.call(server, "/flush_cache", method=method, headers=headers).status_code == 403
    abort = edge.call(server, "/abort_request", {"abort_all": True}, headers=headers)
    assert abort.status_code == 403
    assert engine._aborted == set()


@pytest.mark.parametrize(
    "headers",
    [{}, {"origin": "http://test"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}],
)
def test_tools_and_pages_of_the_same_origin_may(headers):
    server = edge.make_state()
    assert edge.call(server, "/flush_cache", method="POST", headers=headers).status_code == 200
    abort = edge.call(server, "/abort_request", {"abort_all": True}, headers=headers)
    assert abort.status_code == 200
