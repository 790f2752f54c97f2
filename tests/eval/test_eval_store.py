"""What survives a kill, and what a folder refuses."""

from __future__ import annotations

import json

import pytest
from support.full_disk import largest_file

from jdllm import errors
from jdllm.eval import store

SETTINGS = {"task": "gsm8k", "sampling": {"temperature": 0.0, "dllm": {"threshold": 0.9}}}


def test_answers_and_sessions_come_back(tmp_path):
    first = store.Store(tmp_path / "run", SETTINGS)
    first.append({"id": "a", "output": "ü\u2028x"})
    first.append({"id": "b", "output": ""})
    first.add_session({"wall_time_s": 2.0, "num_examples": 2, "completion_tokens": 9})
    again = store.Store(tmp_path / "run", SETTINGS)
    assert again.records == first.records
    assert again.sessions == first.sessions


def test_torn_last_line_is_dropped_and_the_next_line_is_whole(tmp_path):
    first = store.Store(tmp_path, SETTINGS)
    first.append({"id": "a"})
    samples = tmp_path / "samples.jsonl"
    with samples.open("a") as lines:
        lines.write('{"id": "b", "outp')
    again = store.Store(tmp_path, SETTINGS)
    assert list(again.records) == ["a"]
    again.append({"id": "b"})
    assert [json.loads(line)["id"] for line in samples.read_text().splitlines()] == ["a", "b"]


def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path):
    store.Store(tmp_path, SETTINGS).append({"id": "a"})
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"id": \n' + samples.read_text())
    with pytest.raises(errors.ConfigError, match=r"samples.jsonl:1 is damaged"):
        store.Store(tmp_path, SETTINGS)


def test_other_settings_are_refused_by_name(tmp_path):
    store.Store(tmp_path, SETTINGS)
    with pytest.raises(errors.ConfigError, match=r"task: 'gsm8k' -> 'arithmetic'"):
        store.Store(tmp_path, {**SETTINGS, "task": "arithmetic"})
    with pytest.raises(errors.ConfigError, match=r"seed: None -> 3"):
        store.Store(tmp_path, {**SETTINGS, "seed": 3})


def test_foreign_answers_are_not_taken_over(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(errors.ConfigError, match=r"run.json"):
        store.Store(tmp_path, SETTINGS)


def test_an_answer_that_finds_no_room_leaves_no_torn_line(tmp_path):
    made = store.Store(tmp_path, SETTINGS)
    made.append({"id": "a"})
    before = (tmp_path / "samples.jsonl").read_bytes()
    with (
        largest_file(len(before) + 5),
        pytest.raises(store.WriteError, match=r"cannot write .*samples\.jsonl: .*the same command"),
    ):
        made.append({"id": "b", "output": "x" * 100})
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    assert list(made.records) == ["a"]
    made.append({"id": "b"})
    assert list(store.Store(tmp_path, SETTINGS).records) == ["a", "b"]


def test_a_file_that_finds_no_room_keeps_its_old_content(tmp_path):
    made = store.Store(tmp_path, SETTINGS)
    before = (tmp_path / "run.json").read_bytes()
    session = {"wall_time_s": 2.0, "num_examples": 2, "completion_tokens": 9}
    with largest_file(20), pytest.raises(store.WriteError, match=r"cannot write .*run\.json"):
        made.add_session(session)
    with largest_file(20), pytest.raises(store.WriteError, match=r"cannot write .*results\.json"):
        made.write_results({"accuracy": 1.0, "wall_time_s": 3.0})
    assert (tmp_path / "run.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"], "a torn file is left"


def test_answers_to_other_questions_are_refused(tmp_path):
    made = store.Store(tmp_path, SETTINGS)
    for name in "abc":
        made.append({"id": name})
    made.check_asked({"a", "b", "c", "d"})
    with pytest.raises(errors.ConfigError, match="2 questions that this run .*'b'; raise --limit"):
        made.check_asked({"a", "d"})


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"[]", b'{"settings": {}}'])
def test_a_damaged_run_file_is_named(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(errors.ConfigError, match=r"run\.json is damaged"):
        store.Store(tmp_path, SETTINGS)
    (tmp_path / "run.json").unlink()
    store.Store(tmp_path, SETTINGS)
    (tmp_path / "samples.jsonl").write_bytes(content + b"\n")
    with pytest.raises(errors.ConfigError, match=r"samples\.jsonl:1 is damaged"):
        store.Store(tmp_path, SETTINGS)
