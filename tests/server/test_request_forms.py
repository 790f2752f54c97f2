"""HEAD, a slash at the end, compressed bodies: other forms of the same request, on all routes."""

import gzip
import json
import tracemalloc
import zlib

import pytest
from support import edge, fake_engine, fake_images

from jdllm.server import app, middleware
from jdllm.server.edge import metrics, request_forms

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
# Numbers that change from one moment to the next.
CHANGING = {
    "/metrics",
    "/v1/loads",
    "/get_load",
    "/server_info",
    "/get_server_info",
    "/api/version",
}
LIMIT = 100_000


def routes(method: str) -> list[str]:
    """Returns the paths of all routes with a method, those of FastAPI's own included."""
    found = [route for router in app.ROUTERS for route in router.routes]
    return sorted({route.path for route in found if method in route.methods} - {"/v1/images"})


def made(path: str) -> str:
    return path.replace("{model_id:path}", "fake").replace("{image_id}", "none")


@pytest.fixture(params=["text", "images"])
def server(request):
    engines = {"text": fake_engine.FakeEngine, "images": fake_images.FakeImageEngine}
    return edge.make_state(engines[request.param](), enable_metrics=True, api_key="k")


AUTH = {"authorization": "Bearer k"}


@pytest.mark.parametrize("path", [*map(made, routes("GET")), "/", "/openapi.json"])
def test_head_is_get_without_a_body_and_a_slash_changes_nothing(server, path):
    got = edge.call(server, path, headers=AUTH)
    head = edge.call(server, path, method="HEAD", headers=AUTH)
    slash = edge.call(server, f"{path}/", headers=AUTH)
    assert got.content and not head.content
    assert head.status_code == got.status_code == slash.status_code
    kept = [
        {name: value for name, value in one.headers.items() if name not in ("x-request-id", "etag")}
        for one in (got, head, slash)
    ]
    if path not in CHANGING:
        assert kept[0] == kept[1] == kept[2]
        assert int(head.headers["content-length"]) == len(got.content)
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("path", routes("POST"))
def test_a_slash_reaches_every_route_with_its_body(server, path):
    body = {"zzz": 5}
    plain = edge.call(server, path, body, headers=AUTH)
    slash = edge.call(server, f"{path}/", body, headers=AUTH)
    assert (slash.status_code, slash.status_code == 404) == (plain.status_code, False)
    if path not in ("/start_profile", "/v1/images/edits", "/v1/images/variations", "/v1/videos"):
        assert slash.content == plain.content


def test_a_stream_behind_a_slash_and_the_card_of_a_model_whose_name_ends_with_one():
    server = edge.make_state()
    streamed = edge.call(server, f"{CHAT}/", QUESTION | {"stream": True})
    assert edge.frames(streamed)
    server.engine.model_name = "models/mine/"
    for name in ("models/mine/", "models/mine"):
        assert edge.call(server, f"/v1/models/{name}").json()["id"] == "models/mine/"
    assert edge.call(server, "/v1/models/").json()["object"] == "list"


def test_an_image_is_there_for_head_too():
    server = edge.make_state(fake_images.FakeImageEngine())
    made = edge.call(
        server, "/v1/images/generations", {"prompt": "a", "response_format": "url", "seed": 1}
    ).json()
    path = made["data"][0]["url"].removeprefix("http://test")
    got, head = edge.call(server, path), edge.call(server, path, method="HEAD")
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", "image/png")
    assert int(head.headers["content-length"]) == len(got.content)


def test_keys_guard_a_route_in_every_form():
    server = edge.make_state(api_key="k", admin_api_key="a", enable_metrics=True)
    for path in ("/v1/models", "/v1/models/", "/v1/loads/", "/server_info/"):
        for method in ("GET", "HEAD"):
            assert edge.call(server, path, method=method).status_code == 401
    assert edge.call(server, "/flush_cache/", {}, headers=AUTH).status_code == 403
    evil = {"origin": "http://evil", "authorization": "Bearer a"}
    assert edge.call(server, "/flush_cache/", {}, headers=evil).status_code == 403
    for path in ("/health/", "/readyz/"):
        assert edge.call(server, path, method="HEAD").status_code == 200
    assert edge.call(server, "/api/tags/").json()["error"].startswith("missing")


def test_a_line_feed_at_the_end_of_a_path_is_no_way_around_a_key():
    server = edge.make_state(api_key="k", admin_api_key="a", enable_metrics=True)
    for end in ("%0A", "%0A/", "/%0A", "%0D", "%00"):
        for path in (*sorted(middleware.ADMIN_PATHS), "/metrics"):
            for method in ("GET", "POST"):
                refused = edge.call(server, path + end, method=method, headers=AUTH)
                assert refused.status_code in (403, 404), path
            assert edge.call(server, path + end).status_code == 401
    evil = {"origin": "http://evil"}
    refused = edge.call(edge.make_state(), "/flush_cache%0A", {}, headers=evil)
    assert refused.status_code in (403, 404)


def test_a_route_without_get_refuses_head_and_says_what_it_takes():
    server = edge.make_state()
    refused = edge.call(server, CHAT, method="HEAD")
    assert (refused.status_code, refused.content, refused.headers["allow"]) == (405, b"", "POST")
    for path in ("/v1/models", "/v1/models/m", "/v1/images/a/content"):
        assert edge.call(server, path, {}).headers["allow"] == "GET, HEAD"
    assert edge.call(server, "/nowhere", method="HEAD").status_code == 404


def test_metrics_have_one_label_for_all_forms():
    server = edge.make_state(enable_metrics=True)
    for path in (CHAT, f"{CHAT}/", f"{CHAT}//", "/x/", "/x/y/"):
        edge.call(server, path, QUESTION)
        edge.call(server, path, method="HEAD")
    shown = edge.call(server, "/metrics").text
    lines = [one for one in shown.splitlines() if "http_requests_total{" in one]
    assert f'{metrics.PREFIX}http_requests_total{{endpoint="{CHAT}",method="POST"}} 2.0' in lines
    assert {one.partition("{")[2].partition(",")[0] for one in lines} == {
        f'endpoint="{CHAT}"', 'endpoint="other"', 'endpoint="/metrics"'
    }  # fmt: skip


def raw_deflate(content: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(content) + deflate.flush()


ENCODERS = (
    ("gzip", gzip.compress), ("x-gzip", gzip.compress), ("GZIP ", gzip.compress),
    ("deflate", zlib.compress), ("deflate", raw_deflate), ("identity", bytes),
)  # fmt: skip


@pytest.mark.parametrize(("name", "encode"), ENCODERS)
def test_a_compressed_body_is_read_as_the_plain_one(name, encode):
    server = edge.make_state()
    headers = JSON | {"content-encoding": name}
    # Long enough that a thread does it, and short enough that none does.
    for text in ("me", "".join(map(str, range(10_000)))):
        body = QUESTION | {"user": text}
        plain = edge.call(server, CHAT, body).json()
        packed = edge.call(server, CHAT, raw=encode(json.dumps(body).encode()), headers=headers)
        assert packed.json()["choices"] == plain["choices"]
        assert packed.json()["usage"] == plain["usage"]


@pytest.mark.parametrize("path", [one for one in routes("POST") if one != "/stop_profile"])
def test_every_route_that_reads_a_body_decompresses_it(path):
    images = path.startswith("/v1/images")
    server = edge.make_state(fake_images.FakeImageEngine() if images else None)
    body = b'{"zzz": 5}'
    packed = edge.call(
        server, path, raw=gzip.compress(body), headers=JSON | {"content-encoding": "gzip"}
    )
    plain = edge.call(server, path, raw=body, headers=JSON)
    assert (packed.status_code, packed.content) == (plain.status_code, plain.content)


def test_what_is_no_compressed_body_is_refused_and_says_why():
    server = edge.make_state(max_body_bytes=LIMIT)
    packed = gzip.compress(json.dumps(QUESTION).encode())
    for name, body, status, words in (
        ("br", packed, 415, "gzip"),
        ("gzip, gzip", packed, 415, "gzip"),
        ("gzip", b'{"a": 1}', 400, "gzip"),
        ("gzip", packed[:-9], 400, "ends within"),
        ("gzip", packed + packed, 400, "send one stream"),
        ("gzip", b"", 400, "JSON"),
        ("deflate", b"\xff\xff\xff", 400, "deflate"),
        ("gzip", gzip.compress(b" " * (LIMIT + 1)), 413, "100000"),
    ):
        headers = JSON | {"content-encoding": name}
        answer = edge.call(server, CHAT, raw=body, headers=headers)
        assert answer.status_code == status, (name, answer.text)
        assert words in edge.error_of(answer)["message"]
        assert ("accept-encoding" in answer.headers) == (status == 415)
    exact = json.dumps(QUESTION).encode().ljust(LIMIT)
    headers = JSON | {"content-encoding": "gzip"}
    assert edge.call(server, CHAT, raw=gzip.compress(exact), headers=headers).status_code == 200


def test_a_bomb_takes_no_more_memory_than_the_largest_body():
    bomb = gzip.compress(bytes(200_000_000), 1)
    assert len(bomb) < 1_000_000
    tracemalloc.start()
    with pytest.raises(Exception, match="larger than"):
        request_forms.decompressed(bomb, "gzip", 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
