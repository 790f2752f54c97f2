"""`priority` on the routes: honoured with --enable-priority-scheduling, refused by name without."""

import math

import pytest
from support import edge, fake_engine

from jdllm.options import config

TALK = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = {
    "/v1/chat/completions": TALK,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/generate": {"text": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_priority_reaches_the_engine(path, stream):
    on = config.EngineConfig(enable_priority_scheduling=True)
    engine = fake_engine.FakeEngine(engine_config=on)
    server = edge.make_state(engine)
    for priority in (5, None, -3):
        body = ROUTES[path] | {"priority": priority, "stream": stream}
        assert edge.call(server, path, body).status_code == 200
    assert engine.seen_priorities == [-5, math.inf, 3]
    for wrong in ("5", 1.5, True, 2**63):
        response = edge.call(server, path, ROUTES[path] | {"priority": wrong, "stream": stream})
        assert (response.status_code, edge.error_of(response)["param"]) == (400, "priority")


@pytest.mark.parametrize("path", ROUTES)
def test_a_priority_without_effect_is_refused(path):
    server = edge.make_state()
    for neutral in (None, 0):
        assert edge.call(server, path, ROUTES[path] | {"priority": neutral}).status_code == 200
    error = edge.error_of(edge.call(server, path, ROUTES[path] | {"priority": 1}))
    assert error["param"] == "priority" and "--enable-priority-scheduling" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_priority_without_effect_is_refused_also_if_nothing_is_to_be_written(path):
    if path == "/v1/responses":
        return  # its limit is at least 1
    none = {"sampling_params": {"max_new_tokens": 0}} if path == "/generate" else {"max_tokens": 0}
    response = edge.call(edge.make_state(), path, ROUTES[path] | none | {"priority": 1})
    assert (response.status_code, edge.error_of(response)["param"]) == (400, "priority")


@pytest.mark.parametrize("low_first", [False, True])
def test_the_health_check_does_not_wait_behind_other_requests(low_first):
    on = config.EngineConfig(
        enable_priority_scheduling=True, schedule_low_priority_values_first=low_first
    )
    engine = fake_engine.FakeEngine(engine_config=on)
    server = edge.make_state(engine)
    best = -(2**63) if low_first else 2**63 - 1
    assert edge.call(server, "/generate", ROUTES["/generate"] | {"priority": best}).is_success
    assert edge.call(server, "/health_generate").is_success
    asked, probe = engine.seen_priorities
    assert probe <= asked


def test_the_health_check_works_without_priorities():
    engine = fake_engine.FakeEngine()
    assert edge.call(edge.make_state(engine), "/health_generate").is_success
    assert engine.seen_priorities == [0]
