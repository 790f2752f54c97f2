"""`x-request-id` comes back as it was sent, or is made: on answers, errors, streams, in logs."""

from __future__ import annotations

import logging
import re

import pytest
from support import edge, fake_engine

from jdllm.server import middleware

GOOD = ["abc", "0f-1_2.3:4/5+6=7@8~9|0", "x" * 128, "550e8400-e29b-41d4-a716-446655440000"]
BAD = ["", "x" * 129, "a b", "a\tb", 'a"b', "a,b", "a\x1b[31m", "\u00e9".encode(), "a\\b", "<b>"]


def asks():
    text = {"prompt": "hi", "max_tokens": 4}
    yield "GET", "/health", None, 200
    yield "POST", "/v1/completions", text, 200
    yield "POST", "/v1/completions", text | {"stream": True}, 200
    yield "POST", "/v1/completions", {"prompt": [0, 255]}, 500
    yield "POST", "/v1/completions", {"prompt": 5}, 400
    yield "POST", "/v1/completions", {"prompt": "x" * 5000}, 413
    yield "POST", "/flush_cache", None, 403
    yield "DELETE", "/health", None, 405
    yield "GET", "/nothing", None, 404
    yield "OPTIONS", "/v1/models", None, 200


@pytest.mark.parametrize(("method", "path", "body", "status"), [*asks()])
def test_it_is_on_every_answer(method, path, body, status):
    server = edge.make_state(admin_api_key="root", max_body_bytes=1000)
    headers = {"x-request-id": "my-id", "origin": "https://page.example"}
    if method == "OPTIONS":
        headers |= {"access-control-request-method": "GET"}
    response = edge.call(server, path, body, method=method, headers=headers)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["my-id"]
    if method != "OPTIONS" and path != "/flush_cache":
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_it_is_on_401_and_503():
    response = edge.call(edge.make_state(api_key="k"), "/generate", {})
    assert response.status_code == 401
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    response = edge.call(edge.make_state(ready=False), "/generate", {}, headers={})
    assert response.status_code == 503
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("given", GOOD)
def test_a_good_one_comes_back(given):
    response = edge.call(edge.make_state(), "/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", BAD)
def test_a_bad_one_is_replaced(given):
    response = edge.call(edge.make_state(), "/health", headers={"x-request-id": given})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_new_ones_differ():
    server = edge.make_state()
    ids = {edge.call(server, "/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_it_stands_in_the_log_lines(caplog):
    headers = {"x-request-id": "find-me"}
    server = edge.make_state(fake_engine.FakeEngine())
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, middleware.__name__):
        edge.call(server, "/v1/completions", {"prompt": "hi", "max_tokens": 4}, headers=headers)
        edge.call(server, "/v1/completions", {"prompt": [0, 255]}, headers=headers)
    with_id = [record for record in caplog.records if "find-me" in record.getMessage()]
    kinds = {record.getMessage().split()[0] for record in with_id}
    assert {"Finish:", "fault"} <= kinds
    assert sum("/v1/completions" in record.getMessage() for record in with_id) == 2
