"""The size of /metrics does not depend on what clients invent."""

from __future__ import annotations

import asyncio

import httpx
from support import edge

from jdllm.server import app

INVENTED = 3000


def series(text: str) -> set[str]:
    """Returns the samples without their values."""
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


def send(server, asks: list[tuple[str, str]]) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app.create_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for method, path in asks:
                await client.request(method, path)

    asyncio.run(run())


def test_invented_methods_and_paths_add_no_series():
    server = edge.make_state(enable_metrics=True)
    asks = [(f"M{i:x}", f"/p{i:x}") for i in range(INVENTED)]
    asks += [(f"N{i:x}", "/v1/chat/completions") for i in range(20)]
    asks += [("GET", f"/v1/models/m{i:x}") for i in range(20)]
    send(server, [("X", "/x"), ("X", "/v1/chat/completions"), ("GET", "/v1/models/x")])
    send(server, [("GET", "/metrics")])
    before = series(edge.call(server, "/metrics").text)
    send(server, asks)
    response = edge.call(server, "/metrics")
    assert series(response.text) == before
    counts = 'jdllm:http_requests_total{endpoint="other",method="OTHER"}'
    line = next(x for x in response.text.splitlines() if x.startswith(counts))
    assert float(line.rsplit(" ", 1)[1]) == INVENTED + 1


def test_known_methods_paths_and_statuses_keep_their_labels():
    server = edge.make_state(enable_metrics=True, api_key="k")
    send(server, [("POST", "/generate"), ("GET", "/health"), ("get", "/health")])
    text = edge.call(server, "/metrics").text
    labels = 'endpoint="/generate",method="POST",status_code="401"'
    assert f"jdllm:http_responses_total{{{labels}}} 1.0" in text
    assert 'jdllm:http_requests_total{endpoint="/health",method="GET"} 2.0' in text


def test_a_status_outside_the_registry_is_other():
    server = edge.make_state()
    for status in (499, 200, 999, 222):
        server.metrics.count_response("/health", "GET", status)
    text = server.metrics.render().decode()
    for code in ("499", "200", "other"):
        assert f'status_code="{code}"' in text
    # As labels: times of creation stand there too, and may have these digits.
    assert not any(f'status_code="{code}"' in text for code in (222, 999))
