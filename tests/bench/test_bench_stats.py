"""The figures of a run, against numpy on raw lists and arithmetic by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jdllm import errors
from jdllm.bench import stats, tables


def make_record(times, tokens, *, start=0.0, end=None, blocks=None, nfe=None, **options):
    """A record whose commits come at `times` with totals `tokens`, `blocks` and `nfe`."""
    blocks, nfe = blocks or [None] * len(times), nfe or [None] * len(times)
    rows = zip(times, tokens, blocks, nfe, strict=True)
    return stats.Record(
        start_s=start,
        end_s=times[-1] if end is None else end,
        prompt_tokens=10,
        completion_tokens=tokens[-1],
        commits=tuple(stats.Commit(at_s=t, tokens=n, blocks=b, nfe=f) for t, n, b, f in rows),
        nfe=nfe[-1],
        blocks=blocks[-1],
        **options,
    )


def test_what_comes_together_shares_the_time_since_the_arrival_before():
    one = make_record([1.0, 3.0, 4.0], [4, 8, 9], blocks=[1, 2, 3], nfe=[4, 6, 7])
    assert one.intervals("tokens") == pytest.approx([0.5] * 4 + [1.0])
    assert one.intervals("blocks") == pytest.approx([2.0, 1.0])
    assert one.intervals("nfe") == pytest.approx([1.0] * 3)
    assert one.mean_interval_s("tokens") == pytest.approx(3.0 / 5)


def test_blocks_of_one_launch_are_one_arrival():
    one = make_record([1.0, 1.0002, 3.0, 3.0001], [4, 8, 12, 20], blocks=[1, 2, 3, 4])
    assert one.intervals("tokens") == pytest.approx([2.0001 / 12 - 0.0001 / 12] * 12, abs=1e-4)
    assert one.intervals("blocks") == pytest.approx([1.0, 1.0], abs=1e-3)


def test_pieces_without_news_count_as_waiting():
    one = make_record([1.0, 2.0, 4.0], [4, 4, 6])
    assert one.intervals("tokens") == pytest.approx([1.5, 1.5])
    assert one.intervals("blocks") == []


def test_times_of_one_request():
    one = make_record([2.5, 4.0], [1, 5], start=2.0, end=4.5)
    assert one.latency_s == 2.5
    assert one.ttft_s == 0.5
    assert one.tpot_s == pytest.approx((2.5 - 0.5) / 4)
    silent = stats.Record(start_s=0.0, end_s=1.0, prompt_tokens=1)
    assert (silent.ttft_s, silent.tpot_s, silent.intervals("tokens")) == (None, None, [])


def test_figures_are_numpys_over_the_raw_lists():
    rng = np.random.default_rng(0)
    records, ttfts, latencies, itls = [], [], [], []
    for _ in range(37):
        start = rng.uniform(0, 5)
        gaps = rng.uniform(0.01, 0.5, 4)
        times = (start + np.cumsum(gaps)).tolist()
        new = rng.integers(1, 9, 4)
        records.append(make_record(times, np.cumsum(new).tolist(), start=start))
        ttfts.append(gaps[0])
        latencies.append(gaps.sum())
        itls += [gap / n for gap, n in zip(gaps[1:], new[1:], strict=True) for _ in range(n)]
    records.append(stats.Record(start_s=0.0, end_s=9.0, prompt_tokens=99, error="refused"))
    figures = stats.summarize(records, 8.0)
    for name, raw in (("ttft", ttfts), ("e2e_latency", latencies), ("itl", itls)):
        assert figures[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(raw))
        assert figures[f"median_{name}_ms"] == pytest.approx(1e3 * np.median(raw))
        assert figures[f"std_{name}_ms"] == pytest.approx(1e3 * np.std(raw))
        for q in (90, 95, 99):
            assert figures[f"p{q}_{name}_ms"] == pytest.approx(1e3 * np.percentile(raw, q))
    assert figures["max_itl_ms"] == pytest.approx(1e3 * max(itls))
    assert (figures["completed"], figures["failed"]) == (37, 1)
    tokens = sum(one.completion_tokens for one in records)
    assert figures["total_input_tokens"] == 370
    assert figures["output_throughput"] == pytest.approx(tokens / 8)
    assert figures["total_throughput"] == pytest.approx((370 + tokens) / 8)
    assert figures["concurrency"] == pytest.approx(sum(latencies) / 8)


def test_tpf_is_token_weighted_and_per_request():
    records = [
        make_record([1.0], [32], blocks=[1], nfe=[4]),  # TPF 8
        make_record([1.0], [32], blocks=[2], nfe=[16]),  # TPF 2
        make_record([1.0], [5]),  # a server that does not tell
    ]
    figures = stats.denoising(records)
    assert figures["tpf"] == pytest.approx(64 / 20)
    assert figures["mean_tpf"] == pytest.approx((8 + 2) / 2)
    assert (figures["nfe_total"], figures["mean_nfe"], figures["max_nfe"]) == (20, 10, 16)
    assert (figures["blocks_total"], figures["mean_blocks"]) == (3, 1.5)
    assert figures["nfe_per_block"] == pytest.approx(20 / 3)
    assert set(stats.denoising([]).values()) == {None}


def test_peaks_count_tokens_and_requests_per_second_of_the_run():
    records = [
        make_record([100.5, 101.5], [4, 10], start=100.0, end=101.6),
        make_record([101.9], [7], start=101.2, end=101.95),
        make_record([102.1], [1], start=102.05, end=102.1),
    ]
    peaks = stats.peaks(records)
    assert peaks == {"max_output_tokens_per_s": 13.0, "max_concurrent_requests": 2}
    assert stats.peaks([])["max_concurrent_requests"] == 0


def test_engine_figures_are_what_grew_between_two_reads():
    before = {"decode_steps_total": 5, "preemptions_total": 1, "padding_fraction": 0.5}
    after = {"decode_steps_total": 15, "preemptions_total": 4, "padding_fraction": 0.25}
    found = stats.engine_figures(before, after, output_tokens=40)
    assert (found["forwards"], found["tokens_per_forward"]) == (10, 4.0)
    assert (found["preemptions"], found["padding_fraction"]) == (3, 0.25)
    assert found["decode_launches"] is None
    assert set(stats.engine_figures({}, {}, 3).values()) == {None}


def test_rows_have_sglangs_columns():
    shown = tables.rows({"a": 1.234, "b": 7}, [("First (ms):", "a"), ("B:", "b"), ("C:", "c")])
    assert shown == [
        "First (ms):" + " " * 30 + "1.23",
        "B:" + " " * 39 + "7",
        "C:" + " " * 39 + "n/a",
    ]
    assert len(tables.title(" X ")) == 50
    assert tables.sections({"mean_ttft_ms": None}) == []


def test_results_are_appended_as_lines(tmp_path):
    path = tmp_path / "runs.jsonl"
    tables.append(str(path), {"a": 1})
    tables.append(str(path), {"a": 2})
    tables.append("", {"a": 3})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]
    tables.check_writable(str(path))
    assert path.stat().st_size > 0
    tables.check_writable(str(tmp_path / "later.jsonl"))
    assert not (tmp_path / "later.jsonl").exists()
    with pytest.raises(errors.ConfigError, match="cannot write"):
        tables.check_writable(str(tmp_path / "missing" / "runs.jsonl"))
