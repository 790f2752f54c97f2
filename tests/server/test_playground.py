"""The page at `/` as files: safe, small, without other servers, and open where a key is set."""

from __future__ import annotations

import re

import pytest
from support import edge

from jdllm.server.playground import page

MAX_BYTES = 150_000


@pytest.mark.parametrize("path", sorted(page.PATHS))
@pytest.mark.parametrize("ready", [True, False])
def test_files_need_no_key_and_have_a_strict_policy(path, ready):
    response = edge.call(edge.make_state(api_key="key", ready=ready), path)
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] in {
        one.partition(";")[0] for one in page.MEDIA_TYPES.values()
    }
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_key_is_asked_for_everywhere_else():
    server = edge.make_state(api_key="key")
    for path in ("/v1/models", "/model_info", "/playground/", "/playground/none.js"):
        assert edge.call(server, path).status_code == 401


def test_it_can_be_switched_off():
    server = edge.make_state(disable_playground=True)
    for path in sorted(page.PATHS):
        assert edge.call(server, path).status_code == 404


def test_it_is_small_and_names_no_other_server():
    contents = {path: file.read_text() for path, file in page.FILES.items()}
    assert sum(len(text.encode()) for text in contents.values()) < MAX_BYTES
    for text in contents.values():
        assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert name not in text


def test_scripts_and_styles_are_files():
    html = page.FILES["/"].read_text()
    assert not re.findall(r"\son\w+\s*=|style\s*=|<style", html)
    assert all(body == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", html, re.S))
    for address in re.findall(r"""(?:src|href)="(/playground/[^"]+)""", html):
        assert address in page.PATHS
    for path, file in page.FILES.items():
        for name in re.findall(r"""from "\./([^"]+)";""", file.read_text()):
            assert f"/playground/{name}" in page.PATHS, f"{path} imports {name}"


def test_the_scripts_name_only_elements_that_exist():
    html = page.FILES["/"].read_text()
    known = set(re.findall(r'\sid="([^"]+)"', html))
    for path, file in page.FILES.items():
        if path.endswith(".js"):
            assert set(re.findall(r"""\$\("([^"]+)"\)""", file.read_text())) <= known


def test_a_browser_that_has_a_file_does_not_get_it_again():
    server, content = edge.make_state(), page.FILES["/"].read_bytes()
    tag = edge.call(server, "/").headers["etag"]
    for known, status in (
        (tag, 304),
        (f'"other", W/{tag}', 304),
        ("*", 304),
        ('"other"', 200),
        (tag[1:-1], 200),
    ):
        response = edge.call(server, "/", headers={"If-None-Match": known})
        assert response.status_code == status
        assert response.content == (b"" if status == 304 else content)
        assert response.headers["etag"] == tag
