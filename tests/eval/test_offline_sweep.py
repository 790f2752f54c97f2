"""`jdllm.sweep`: a row per setting, with the figures and files of `jdllm eval --sweep`."""

from __future__ import annotations

import json
import math

import pytest
from support import toy_engine

import jdllm
from jdllm import errors


class SpeedyEngine(toy_engine.ToyEngine):
    """Needs 12 forwards at threshold 1 and 3 at threshold 0.25, for an answer of six tokens."""

    def nfe(self, params):
        return round(12 * params.dllm.threshold)


@pytest.fixture
def engine():
    return SpeedyEngine()


@pytest.fixture
def data(tmp_path):
    """Four questions; the engine counts words, and is wrong on the third."""
    rows = [("one two", 2), ("one", 1), ("two words", 9), ("a b c", 3)]
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"question": q, "answer": f"#### {a}"}) + "\n" for q, a in rows]
    path.write_text("".join(lines))
    return str(path)


def test_a_task_gives_accuracy_beside_speed(engine, data, tmp_path):
    thresholds = [0.25, 1.0]
    table = jdllm.sweep(
        engine, "gsm8k", {"threshold": thresholds}, data=data, output_dir=tmp_path / "out"
    )
    assert [row["threshold"] for row in table] == thresholds
    assert [row["tpf_mean"] for row in table] == [6 / 3, 6 / 12]
    for row in table:
        assert (row["accuracy"], row["num_examples"]) == (0.75, 4)
        assert row["accuracy_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert {one.temperature for one in engine.params} == {0.0}
    assert str(table).startswith("| threshold | accuracy |") and "AUP: " in str(table)
    page = table._repr_html_()
    assert page.count("<tr>") == 3 and page.count("<td>75.00 % \u00b1 25.00 %</td>") == 2
    # The files are those of the command, and the same call asks nothing anew.
    assert len((tmp_path / "out" / "sweep.csv").read_text().splitlines()) == 3
    assert (tmp_path / "out" / "sweep.png").is_file()
    asked = len(engine.params)
    again = jdllm.sweep(
        engine, "gsm8k", {"threshold": thresholds}, data=data, output_dir=tmp_path / "out"
    )
    assert len(engine.params) == asked
    assert [row["accuracy"] for row in again] == [0.75, 0.75]


def test_prompts_and_several_options(engine):
    table = jdllm.sweep(
        engine,
        ["one", "one two"],
        {"threshold": [0.5, 1.0], "edit_threshold": [0.1, 0.2]},
        sampling={"seed": 3, "dllm": {"algorithm": "JointThreshold"}},
    )
    rows = [(row["threshold"], row["edit_threshold"], row["tpf_mean"]) for row in table]
    assert rows == [
        (0.5, 0.1, 1.0),
        (0.5, 0.2, 1.0),
        (1.0, 0.1, 0.5),
        (1.0, 0.2, 0.5),
    ]
    assert all(row["accuracy"] is None and row["invalid_rate"] is None for row in table)
    assert {(one.seed, one.dllm.algorithm) for one in engine.params} == {(3, "JointThreshold")}
    assert "AUP" not in str(table) and "| n/a \u00b1 n/a |" in str(table)


def test_it_is_a_data_frame(engine):
    pandas = pytest.importorskip("pandas", reason="pandas is no dependency of the tests")
    table = jdllm.sweep(engine, ["one"], {"threshold": [0.5, 1.0]})
    frame = pandas.DataFrame(table)
    assert list(frame.columns[:2]) == ["threshold", "accuracy"]
    assert frame["tpf_mean"].tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    "questions, options, more, words",
    [
        ("gsm9k", {"threshold": [1]}, {}, "did you mean 'gsm8k'"),
        ("humaneval", {"threshold": [1]}, {}, "jdllm eval --sweep"),
        ("arithmetic", {"threshold": [1]}, {"limit": 0}, "limit=0 must be"),
        (["a"], {"threshold": []}, {}, "at least one value"),
        (["a"], {}, {}, "at least one value"),
        ([], {"threshold": [1]}, {}, "needs a prompt"),
        (["a"], {"threshold": [1]}, {"limit": 3}, "limit is for tasks"),
        (["a"], {"threshold": [1]}, {"sampling": {"dllm": {"threshold": 1}}}, "both give thresh"),
        (["a"], {"treshold": [1]}, {}, "did you mean 'threshold'"),
        (["a"], {"threshold": [0.5, -1]}, {}, "threshold"),
        (["a"], {"threshold": [1, 0.5, 1.0]}, {}, "sweep of threshold has the value 1.0 twice"),
    ],
)
def test_a_wrong_sweep_ends_before_the_first_answer(engine, questions, options, more, words):
    with pytest.raises((errors.ConfigError, errors.RequestError), match=words):
        jdllm.sweep(engine, questions, options, **more)
    assert engine.params == []
