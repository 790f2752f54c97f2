"""What survives a kill, and what a folder refuses."""

from __future__ import annotations

import json

import pytest

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
