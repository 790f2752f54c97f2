"""/docs works on a machine that reaches no other, and shows what the server takes."""

from __future__ import annotations

import html
import re

from support import edge

from jdllm.server import app
from jdllm.server.operations import docs_page


def test_it_points_to_no_other_server_and_runs_no_script():
    response = edge.call(edge.make_state(), "/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", response.text)
    assert "://" not in response.text and "<script" not in response.text
    assert "@import" not in response.text and "url(" not in response.text
    links = re.findall(r'href="([^"]*)"', response.text)
    assert links == ["openapi.json"]
    assert edge.call(edge.make_state(), "/" + links[0]).status_code == 200


def test_fastapis_pages_are_gone():
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert edge.call(edge.make_state(), path).status_code == 404


def test_it_shows_every_route_and_its_fields():
    text = html.unescape(edge.call(edge.make_state(), "/docs").text)
    for router in app.ROUTERS:
        for route in router.routes:
            assert not route.include_in_schema or f"</span> {route.path}" in text.replace(
                ":path}", "}"
            ).replace("{model_id}", "{model_id:path}")
    for field in ("messages", "max_completion_tokens", "input_ids", "abort_all", "?timeout"):
        assert f"<td>{field}<td>" in text
    assert "<td>stop_token_ids<td>list of integer<td>" in text


def test_text_is_escaped():
    marked = "<script>alert('&')</script>"
    operation = {
        "description": marked,
        "parameters": [{"name": marked, "in": "query", "schema": {"default": marked}}],
    }
    schema = {
        "info": {"title": marked, "version": "1"},
        "paths": {f"/{marked}": {"get": operation}},
    }
    text = docs_page.page(schema)
    assert "<script" not in text and "('&')" not in text
    assert text.count("&lt;script&gt;alert") == 6  # the title twice
