"""The figures of a run against arithmetic done by hand."""

from __future__ import annotations

import math

import pytest

from jdllm.eval import summary


def record(correct: bool, tokens: int, nfe: int | None, latency: float, invalid=False):
    return {
        "correct": correct,
        "invalid": invalid,
        "nfe": nfe,
        "completion_tokens": tokens,
        "finish_reason": "length" if invalid else "stop",
        "latency": latency,
    }


RECORDS = [
    record(True, 40, 10, 1.0),  # TPF 4
    record(True, 30, 30, 2.0),  # TPF 1
    record(False, 20, 10, 3.0, invalid=True),  # TPF 2
    record(True, 10, 10, 4.0),  # TPF 1
]
SESSIONS = [
    {"wall_time_s": 4.0, "num_examples": 3, "completion_tokens": 90},
    {"wall_time_s": 1.0, "num_examples": 1, "completion_tokens": 10},
]


def test_summary_by_hand():
    results = summary.summarize(RECORDS, SESSIONS)
    assert results["num_examples"] == 4
    assert results["accuracy"] == 0.75
    assert results["accuracy_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert results["invalid_rate"] == 0.25
    assert results["tpf_mean"] == pytest.approx((4 + 1 + 2 + 1) / 4)
    assert results["tpf_token_weighted"] == pytest.approx(100 / 60)
    assert (results["nfe_mean"], results["nfe_total"]) == (15.0, 60)
    assert results["completion_tokens"] == 100
    assert results["output_tokens_per_s"] == pytest.approx(100 / 5.0)
    assert results["latency_p50_s"] == pytest.approx(2.5)
    assert results["latency_p95_s"] == pytest.approx(3.85)  # 3 + 0.85 of the way to 4
    assert results["num_cut_by_length"] == 1


def test_unknown_nfe_and_few_examples_give_none_not_a_wrong_number():
    results = summary.summarize([record(True, 5, None, 1.0)], [])
    assert results["tpf_mean"] is results["tpf_token_weighted"] is results["nfe_mean"] is None
    assert results["accuracy_stderr"] is results["output_tokens_per_s"] is None
    assert "TPF: n/a" in summary.lines(results)


def test_four_lines_are_sglangs():
    text = summary.lines(summary.summarize(RECORDS, SESSIONS)).splitlines()
    assert text[:4] == [
        "Accuracy: 0.750",
        "Invalid: 0.250",
        "Latency: 5.000 s",
        "Output throughput: 20.000 token/s",
    ]
    assert text[4:6] == ["TPF: 2.000 (token-weighted 1.667)", "NFE: 15.000 per request"]


def test_sweep_has_one_row_per_point():
    points = {
        "0.5": summary.summarize(RECORDS, SESSIONS),
        "0.9": summary.summarize(RECORDS[:1], []),
    }
    rows = summary.sweep_csv("threshold", points).splitlines()
    assert rows[0].startswith("threshold,accuracy,")
    assert rows[1].startswith("0.5,0.75,")
    assert rows[2].startswith("0.9,1.0,,0.0,4.0,4.0,10.0,,")
    table = summary.sweep_markdown("threshold", points).splitlines()
    assert sum(row.startswith("|") for row in table) == 4
    # TPF 2 and 4; accuracies 75 and 100 %; the weight of 75 % is exp(-3 / 4).
    area = 2 * 75 + (75 * math.exp(-0.75) + 100)
    assert table[5].startswith(f"AUP: {area:.2f} (best accuracy 100.00 %")
    assert "| 0.5 | 75.00 %" in table[2]
