"""Plots of result files: what is drawn is what the rows say, and other files are refused."""

import json
import pathlib
import re

import pytest

from jdllm.bench import one_batch, stats
from jdllm.plots import __main__, results

pytest.importorskip("matplotlib", reason="it comes with the extra plot")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def batch_rows(factor=1.0):
    return [
        {
            "batch_size": size,
            "threshold": threshold,
            "output_throughput": factor * size * (100 if threshold else 3000),
            "median_decode_latency": 0.005 * size,
            "mean_decode_latency": 0.005 * size,
        }
        for threshold in (0.95, 0.0)
        for size in (16, 1, 4)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_line_per_setting_in_the_order_of_x(tmp_path, capsys):
    (kind,) = {results.kind_of({"a": batch_rows()}).name}
    assert kind == "one_batch"
    throughput, latency = results.KINDS[0].panels
    lines = throughput.lines(batch_rows())
    assert lines["threshold 0.95"] == [(16, 1600), (1, 100), (4, 400)]
    assert latency.lines(batch_rows())["threshold 0.0"][0] == (16, 80.0)
    assert __main__.main([write(tmp_path / "result.jsonl", batch_rows())]) == 0
    assert f"wrote {tmp_path / 'result.png'}" in capsys.readouterr().out
    drawn = (tmp_path / "result.svg").read_text()
    for text in ("output tokens/s", "ms per forward", "threshold 0.95", "threshold 0.0"):
        assert text in drawn
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_drawn_side_by_side(tmp_path):
    before = write(tmp_path / "before.jsonl", batch_rows())
    after = write(tmp_path / "after.jsonl", batch_rows(1.1))
    name = tmp_path / "both"
    assert __main__.main([before, after, "--output-file", str(name)]) == 0
    drawn = name.with_suffix(".svg").read_text()
    for text in ("before: threshold 0.95", "after: threshold 0.95"):
        assert len(re.findall(re.escape(text), drawn)) >= 2, "in both panels"
    assert __main__.labels(["a/x.jsonl", "b/x.jsonl"]) == {p: p for p in ("a/x.jsonl", "b/x.jsonl")}


def test_the_curve_of_a_training_run(tmp_path):
    curve = ROOT / "configs" / "train" / "nano-curve.jsonl"
    rows = results.read(str(curve))
    assert results.kind_of({"nano": rows}).name == "training"
    loss, accuracy = results.KINDS[2].panels
    assert len(loss.lines(rows)["training"]) > 100
    last = accuracy.lines(rows)["0.95"][-1]
    assert last == (49460, pytest.approx(90.3))
    assert __main__.main([str(curve), "--output-file", str(tmp_path / "curve")]) == 0
    assert "held out" in (tmp_path / "curve.svg").read_text()


def test_rows_have_the_fields_that_plots_read():
    row = {"backend": "sglang", **stats.summarize([], 1.0), "concurrency": 1.0}
    row |= dict.fromkeys(("completed", "failed"), 1)
    serving = next(kind for kind in results.KINDS if kind.name == "serving")
    assert serving.fields <= row.keys()
    assert "median_decode_latency" in (one_batch.__doc__ or "")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["nothing"], "JSON lines"),
        (["[1]\n"], "no JSON object"),
        (['{"a": 1}\n'], "holds no results of these kinds: one_batch, serving, training"),
        ([""], "holds no results"),
        (['{"step": 1, "seconds": 2}\n'], "no row has a figure to plot"),
        (['{"step": 1, "seconds": 2}\n', json.dumps(batch_rows()[0]) + "\n"], "several kinds"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, texts, said):
    paths = [tmp_path / f"{i}.jsonl" for i in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_text(text)
    assert __main__.main([*map(str, paths), "--output-file", str(tmp_path / "plot")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_a_missing_file_and_a_name_that_cannot_be_written(tmp_path, capsys):
    assert __main__.main([str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    rows = write(tmp_path / "rows.jsonl", batch_rows())
    assert __main__.main([rows, "--output-file", str(tmp_path / "no" / "plot")]) == 2
    assert "cannot write" in capsys.readouterr().err
