"""Probes of Kubernetes and SageMaker, the version, and the load routes that routers read."""

from __future__ import annotations

import datetime

import pytest
from support import edge, fake_engine

from jdllm import version

PROBES = ("/health", "/ready", "/readyz", "/ping")


def states():
    starting = edge.make_state(ready=False)
    draining = edge.make_state()
    draining.phase = "draining"
    dead = edge.make_state(fake_engine.FakeEngine())
    dead.loaded_engine.is_alive = False
    stuck = edge.make_state(fake_engine.FakeEngine())
    stuck.loaded_engine.heartbeat_age_s = lambda: 1000.0
    yield "ready", edge.make_state(), 200, 200
    yield "starting", starting, 503, 200
    yield "draining", draining, 503, 200
    yield "dead", dead, 503, 503
    yield "stuck", stuck, 503, 503


@pytest.mark.parametrize(
    ("server", "ready", "live"), [pytest.param(*rest, id=name) for name, *rest in states()]
)
def test_probes(server, ready, live):
    for path in PROBES:
        response = edge.call(server, path)
        assert response.status_code == ready
        assert ("retry-after" in response.headers) == (ready == 503)
    assert edge.call(server, "/livez").status_code == live


def test_version_also_while_starting():
    for ready in (True, False):
        response = edge.call(edge.make_state(ready=ready), "/version")
        assert response.json() == {"version": version.__version__}


def busy():
    engine = fake_engine.FakeEngine()
    engine.open_requests |= {"a", "b"}
    return edge.make_state(engine)


def test_loads_have_sglangs_shape():
    content = edge.call(busy(), "/v1/loads").json()
    assert set(content) == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
    assert datetime.datetime.fromisoformat(content["timestamp"]).tzinfo is not None
    (load,) = content["loads"]
    # The core keys of SGLang 0.5.23 that mean something here.
    assert load["num_running_reqs"] == 2 and load["dp_rank"] == 0
    core = {
        "timestamp",
        "dp_rank",
        "num_running_reqs",
        "num_waiting_reqs",
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "max_total_num_tokens",
        "max_running_requests",
        "token_usage",
        "gen_throughput",
        "cache_hit_rate",
        "utilization",
    }
    assert set(load) == core | {"memory", "queues"}
    assert set(load["memory"]) == {"weight_gb", "kv_cache_gb", "graph_gb", "token_capacity"}
    for include, wanted in (
        ("core", core),
        ("core,queues", core | {"queues"}),
        ("memory", core | {"memory"}),
        ("spec,lora,disagg", core),
        ("all", set(load)),
    ):
        content = edge.call(busy(), f"/v1/loads?include={include}&dp_rank=0").json()
        assert set(content["loads"][0]) == wanted


def test_loads_for_prometheus():
    response = edge.call(busy(), "/v1/loads?format=prometheus")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    assert 'sglang_num_running_reqs{dp_rank="0"} 2' in lines
    assert "# TYPE sglang_memory_token_capacity gauge" in lines
    assert all(line.startswith(("# TYPE sglang_", "sglang_")) for line in lines)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("dp_rank=1", "dp_rank"),
        ("dp_rank=x", "dp_rank"),
        ("include=core,nothing", "include"),
        ("include=" + "x" * 9000, "include"),
        ("format=xml", "format"),
    ],
)
def test_wrong_questions_about_loads(query, param):
    response = edge.call(busy(), f"/v1/loads?{query}")
    assert response.status_code == 400 and len(response.text) < 500
    assert edge.error_of(response)["param"] == param


def test_get_load_is_a_list_that_routers_sum_up():
    (entry,) = edge.call(busy(), "/get_load").json()
    assert entry["num_reqs"] == 2 and entry["num_waiting_reqs"] == 0
    assert isinstance(entry["num_tokens"], int) and entry["dp_rank"] == 0
