"""A campaign of requests against the real server: valid ones, wrong ones, and no requests at all.

By default a few hundred requests, so that every law is tried; by hand, before a release:

    python -m pytest tests/server/test_fuzz.py -m long -s

A broken law is reported with its seed and number; `cases.Maker.case` makes the same request again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from support import compiling, cut_model, stalls
from support.fuzz import asks, bodies, campaign, cases, checks, process, wire

from jdllm.checkpoint import source
from jdllm.server.edge import metrics

SEED = 18
DEFAULT, LONG = 300, 100_000
WARM_UP = 0.2  # of the requests come before memory is measured: all threads, all sizes
GROWTH_BYTES = 128 << 20  # what sizes and threads that come later may add
# The whole suite may run beside it. By hand, on a quiet machine, the bound is that of `stalls`.
ON_A_BUSY_MACHINE_S = 5.0
# Twice what is in use after a long campaign: the labels of a series come from closed sets.
MAX_SERIES = 1200
NO_IDS = {one: [5, 6, 7] for one in asks.ASKS}


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[process.Server, int]]:
    """A server of few layers and few launches, which take longer to compile than to serve.

    What the model says is never sure, so a lower threshold gives answers of as few steps.
    """
    model, options = tmp_path / "model", tmp_path / "options.yaml"
    cut_model.write(model)
    options.write_text("threshold: 0.05\n")
    few = ("--max-running-requests=2", f"--dllm-algorithm-config={options}")
    with process.serving(tmp_path, model, *few) as found:
        yield found


@pytest.fixture
def fast_server(tmp_path) -> Iterator[tuple[process.Server, int]]:
    """The bundled model's server; it compiles for longer, and then takes a third of the time."""
    model = source.bundled_model()
    env = {"XLA_FLAGS": compiling.flags_of_users()}
    with process.serving(tmp_path, model, "--max-running-requests=4", **env) as found:
        yield found


def attack(
    server: tuple[process.Server, int], seed: int, count: int, longest_probe_s: float
) -> None:
    """Sends `count` cases and checks all that the server must keep."""
    running, port = server
    one = campaign.Campaign(port, running.popen.pid, seed)
    report = one.run(range(round(WARM_UP * count)))
    warm_bytes = report.resident_bytes[-1]
    one.run(range(round(WARM_UP * count), count))
    text = "\n".join(report.summary())
    sys.stdout.write(text + "\n")
    assert report.num_wrong == 0, text
    assert report.num_right > count / 10 and report.num_control > 0, text
    assert report.longest_probe_s < longest_probe_s, text
    assert report.resident_bytes[-1] - warm_bytes < GROWTH_BYTES, text
    shown = one.admin("GET", "/metrics").body.decode()
    assert len(campaign.series(shown)) < MAX_SERIES
    labels = {name: set(re.findall(rf'{name}="([^"]*)"', shown)) for name in ("method", "status")}
    assert labels["method"] <= metrics.METHODS | {metrics.OTHER_METHOD}
    assert labels["status"] <= {str(status) for status in (*checks.STATUSES, 499)}


@pytest.mark.campaign
def test_no_request_is_answered_wrongly_and_nothing_is_left_of_any(server):
    attack(server, SEED, DEFAULT, ON_A_BUSY_MACHINE_S)

    check_log(server)


@pytest.mark.long
def test_the_same_with_a_hundred_thousand_requests(fast_server):
    attack(fast_server, SEED + 1, LONG, stalls.LONGEST_STALL_S)
    check_log(fast_server)


def check_log(server: tuple[process.Server, int]) -> None:
    """Ends the server; checks that it ends in order and that no log line is forged."""
    running, _ = server
    assert running.stop() == 0
    ready = next(i for i, line in enumerate(running.log) if "fired up" in line)
    lines = [line.rstrip("\n") for line in running.log[ready:]]
    assert len(lines) > DEFAULT
    assert [line for line in lines if not checks.LOG_LINE.fullmatch(line)] == []
    assert [line for line in lines if " ERROR " in line.partition(": ")[0]] == []


def test_a_seed_makes_the_same_requests_again():
    first, again, other = (
        [maker.case(number).raw() for number in range(200)]
        for maker in (cases.Maker(seed, NO_IDS, key="k") for seed in (1, 1, 2))
    )
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 50


def test_a_campaign_has_every_kind_of_case_and_every_route():
    maker = cases.Maker(SEED, NO_IDS, key="k", names=campaign.OWN_NAMES)
    found = [maker.case(number) for number in range(2000)]
    assert {case.kind for case in found} == {
        "abort", "aborted", "anything", "compressed", "damaged", "field twice", "get",
        "headers", "http", "keys", "large", "leaves", "many", "method", "missing", "no object",
        "tokens", "valid", "wrong field",
    }  # fmt: skip
    for path in asks.ROUTES:
        assert {case.kind for case in found if case.path == path} >= {"valid", "wrong field"}


def test_every_wrong_value_of_a_field_is_json():
    for wrong in bodies.FIELDS.values():
        for value in (one for texts in wrong.values() for one in texts):
            json.loads(value)


OK_BODY = b'{"choices": [{"text": "a", "finish_reason": "stop"}]}'
HEADERS = {"x-request-id": "r", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, HEADERS, b'{"error": {}}'),
        (302, HEADERS, b"{}"),
        (200, HEADERS | {"x-request-id": "a b"}, b"{}"),
        (400, HEADERS, b'{"detail": "x"}'),
        (400, HEADERS, b'{"error": {"message": "x"}}'),
        (400, HEADERS | {"content-type": "text/plain"}, b"no"),
        (503, HEADERS, b'{"error": {"message": "x", "type": "", "param": null, "code": null}}'),
    ],
)
def test_a_bad_answer_is_seen(status, headers, body):
    with pytest.raises(checks.Wrong):
        checks.shape(wire.Reply(status, headers, body), asks.TEXT, "POST")


def test_a_wrong_text_is_seen():
    asked = asks.Asked(path=asks.TEXT, body={})
    found = checks.choices(asks.TEXT, wire.Reply(200, HEADERS, OK_BODY), is_stream=False)
    checks.right(found, ("a", "stop"), asked)
    for expected in (("b", "stop"), ("a", "length")):
        with pytest.raises(checks.Wrong):
            checks.right(found, expected, asked)
    with pytest.raises(checks.Wrong):
        checks.right(found * 2, ("a", "stop"), asked)
