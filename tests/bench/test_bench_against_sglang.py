"""Each figure of a run that SGLang's tool computes, too, against SGLang and against its definition.

The golden file holds recorded streams of /generate, and what SGLang's own client and
`calculate_metrics` made of them. Here the streams go through our client and our statistics, and
through an oracle: numpy on the raw events, from the definitions alone.
"""

from __future__ import annotations

import json
import pathlib
import random

import numpy as np
import pytest

from jdllm.bench import backends, prompts, stats
from jdllm.client import failures

GOLDEN = json.loads(
    (
        pathlib.Path(__file__).resolve().parents[1]
        / "data/goldens/bench/serving_sglang_0.5.23.json"
    ).read_text()
)
# SGLang's name -> the key of its result file and of ours, where the two differ.
KEYS = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
# Not measured here: pictures, and a second count with a tokenizer of the client.
LEFT_OUT = {"total_input_text", "total_input_vision"} | {
    name for name in GOLDEN["metrics"] if name.endswith("retokenized")
}
# SGLang counts the first piece of a stream as one token; here it counts with all its tokens.
OTHER = "max_output_tokens_per_s"
SHARED = sorted(GOLDEN["metrics"].keys() - LEFT_OUT - {OTHER})
CLOSE = 1e-9


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class RecordedClient:
    """Plays a recorded stream, event by event, at the time of each event."""

    def __init__(self, request, clock):
        self.request, self.clock = request, clock

    def events(self, route, body):
        assert (route, body["stream"]) == ("/generate", True)
        if self.request["is_failed"]:
            raise failures.BadAnswer("refused")
        last = self.request["events"][-1]
        for at_s, tokens in self.request["events"]:
            self.clock.now = at_s
            finish = {"type": "length"} if [at_s, tokens] == last else None
            counts = {"completion_tokens": tokens, "prompt_tokens": self.request["prompt_tokens"]}
            yield at_s, {"text": "x" * tokens, "meta_info": counts | {"finish_reason": finish}}


def measured(requests, duration_s, monkeypatch):
    """What our client and our statistics make of recorded requests."""
    clock, records = Clock(), []
    monkeypatch.setattr(backends, "time", clock)
    options = backends.Options(kind="generate", model="m")
    for request in requests:
        clock.now = request["start_s"]
        prompt = prompts.Prompt(
            content="p", prompt_len=request["prompt_tokens"], output_len=request["events"][-1][1]
        )
        records.append(backends.send(RecordedClient(request, clock), prompt, options))
    return stats.summarize(records, duration_s)


def expected(requests, duration_s):
    """The figures from their definitions, with SGLang's names; times are in ms."""
    done = [request for request in requests if not request["is_failed"]]
    starts = np.array([request["start_s"] for request in done])
    ends = np.array([request["events"][-1][0] for request in done])
    ttft = np.array([request["events"][0][0] for request in done]) - starts
    prompt = sum(request["prompt_tokens"] for request in done)
    output = np.array([request["events"][-1][1] for request in done])
    many = output > 1
    itl = []
    for request in done:
        times, totals = np.array(request["events"]).T
        first = np.unique(totals, return_index=True)[1]  # events that bring tokens
        gaps, new = np.diff(times[first]), np.diff(totals[first]).astype(int)
        itl += np.repeat(gaps / new, new).tolist()
    seconds = {
        "e2e_latency": ends - starts,
        "ttft": ttft,
        "tpot": ((ends - starts - ttft)[many]) / (output[many] - 1),
        "itl": np.array(itl),
    }
    figures = {
        "completed": len(done),
        "total_input": prompt,
        "total_output": output.sum(),
        "request_throughput": len(done) / duration_s,
        "input_throughput": prompt / duration_s,
        "output_throughput": output.sum() / duration_s,
        "total_throughput": (prompt + output.sum()) / duration_s,
        "concurrency": (ends - starts).sum() / duration_s,
        "max_itl_ms": 1e3 * max(itl),
    }
    for name, values in seconds.items():
        figures |= {
            f"mean_{name}_ms": 1e3 * values.sum() / len(values),
            f"std_{name}_ms": 1e3 * np.sqrt(((values - values.mean()) ** 2).mean()),
            **{f"p{q}_{name}_ms": 1e3 * quantile(values, q / 100) for q in (90, 95, 99)},
            f"median_{name}_ms": 1e3 * quantile(values, 0.5),
        }
    # Open in a second: begun in it or before, and not ended before it.
    begin = starts.min()
    seconds_of_run = range(int(np.ceil(ends.max() - begin)) + 1)
    figures["max_concurrent_requests"] = max(
        np.sum((np.floor(starts - begin) <= s) & (np.floor(ends - begin) >= s))
        for s in seconds_of_run
    )
    return figures


def quantile(values, share):
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def random_requests(rng):
    requests = []
    for number in range(rng.choice([3, 30])):
        start = at = rng.uniform(100.0, 104.0)
        tokens, events = 0, []
        for k in range(rng.randint(1, 12)):
            at += rng.uniform(2 * stats.TOGETHER_S, 0.7)
            tokens += rng.choice([1, 4, 32] if k == 0 else [0, 1, 4, 32])
            events.append([at, tokens])
        requests.append(
            {
                "start_s": start,
                "prompt_tokens": rng.randint(1, 999),
                "events": events,
                "is_failed": number % 9 == 8,
            }
        )
    at, tokens = requests[0]["events"][-1]
    requests[0]["events"].append([at + 0.3, tokens + 5])  # one time between tokens at least
    return requests


def test_the_golden_file_has_every_field_of_sglangs_metrics():
    assert len(GOLDEN["metrics"]) == 40 and "SGLang 0.5.23" in GOLDEN["origin"]
    assert {request["is_failed"] for request in GOLDEN["requests"]} == {True, False}
    assert {len(request["events"]) == 1 for request in GOLDEN["requests"]} == {True, False}


@pytest.mark.parametrize("field", SHARED)
def test_a_figure_is_sglangs(field, monkeypatch):
    ours = measured(GOLDEN["requests"], GOLDEN["duration_s"], monkeypatch)
    assert ours[KEYS.get(field, field)] == pytest.approx(GOLDEN["metrics"][field], rel=CLOSE)


def test_the_oracle_agrees_with_sglang():
    oracle = expected(GOLDEN["requests"], GOLDEN["duration_s"])
    assert sorted(oracle) == SHARED
    for field in SHARED:
        assert oracle[field] == pytest.approx(GOLDEN["metrics"][field], rel=CLOSE), field


@pytest.mark.parametrize("seed", range(8))
def test_every_figure_is_what_its_definition_says(seed, monkeypatch):
    rng = random.Random(seed)
    requests, duration_s = random_requests(rng), rng.uniform(5.0, 20.0)
    ours, oracle = measured(requests, duration_s, monkeypatch), expected(requests, duration_s)
    assert sorted(oracle) == SHARED
    for field in SHARED:
        assert ours[KEYS.get(field, field)] == pytest.approx(oracle[field], rel=1e-6), field


def test_the_peak_of_tokens_counts_every_token_of_the_first_piece(monkeypatch):
    ours = measured(GOLDEN["requests"], GOLDEN["duration_s"], monkeypatch)
    done = [request for request in GOLDEN["requests"] if not request["is_failed"]]
    begin = min(request["start_s"] for request in done)
    seconds = np.zeros(20, int)
    for request in done:
        before = 0
        for at_s, tokens in request["events"]:
            seconds[int(at_s - begin)] += tokens - before
            before = tokens
    assert ours[OTHER] == seconds.max() > GOLDEN["metrics"][OTHER]
