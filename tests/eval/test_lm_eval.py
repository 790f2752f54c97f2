"""The model that lm-eval gets; needs lm_eval, but for the message that says so."""

import importlib
import json
import subprocess
import sys
import types

import pytest
from support import toy_server

from jdllm import errors


def test_without_lm_eval_the_command_says_what_to_install():
    program = (
        "import runpy, sys\nsys.modules['lm_eval'] = None\n"
        "runpy.run_module('jdllm.eval.lm_eval', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'jdllm[eval]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def lm_class():
    pytest.importorskip("lm_eval")
    # Not at the top: this file is also collected without lm_eval.
    return importlib.import_module("jdllm.eval.lm_eval_model").JdllmLM


@pytest.fixture
def server():
    with toy_server.serving() as handler:
        yield handler


def requests(*args):
    return [types.SimpleNamespace(args=one) for one in args]


GREEDY = {"until": [" two", "\n\n"], "max_gen_toks": 50, "do_sample": False, "temperature": 0.7}


def test_texts_over_http_are_cut_and_ordered(lm_class, server):
    lm = lm_class(base_url=server.url, threshold=0.5, algorithm="LowConfidence", batch_size=1)
    server.texts |= {"a": "one two three", "b": "x\n\n two", "c": "whole"}
    assert lm.generate_until(requests(*((name, GREEDY) for name in "cab"))) == ["whole", "one", "x"]
    body = server.bodies[0]
    assert body["path"] == "/v1/completions"
    assert (body["temperature"], body["max_tokens"]) == (0.0, 50)
    assert body["stop"] == [" two", "\n\n"]
    assert body["dllm"] == {"algorithm": "LowConfidence", "threshold": 0.5}


def test_a_chat_is_sent_as_messages_and_a_length_of_the_line_wins(lm_class, server):
    lm = lm_class(base_url=server.url, gen_length=64, threshold=0.5, temperature=0.2)
    context = lm.apply_chat_template([{"role": "user", "content": "three words here"}])
    assert lm.generate_until(requests((context, GREEDY))) == ["#### 3"]
    body = server.bodies[0]
    assert body["path"] == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "three words here"}]
    assert (body["temperature"], body["max_tokens"]) == (0.2, 64)
    assert body["dllm"] == {"threshold": 0.5}


def test_sampling_of_the_task_and_unknown_names(lm_class, server):
    lm = lm_class(base_url=server.url)
    lm.generate_until(requests(("a", {"until": [], "temperature": 0.7, "top_p": 0.9})))
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_p"]) == (0.7, 0.9)
    assert server.bodies[0]["max_tokens"] == 256
    many = [f"stop {i}" for i in range(40)]
    server.texts["b"] = "until stop 39 and on"
    assert lm.generate_until(requests(("b", {"until": many}))) == ["until "]
    with pytest.raises(errors.RequestError, match="unknown parameter 'num_beam'"):
        lm.generate_until(requests(("a", {"until": [], "num_beam": 2})))


def test_what_has_no_likelihood_says_why(lm_class, server):
    lm = lm_class(base_url=server.url)
    with pytest.raises(NotImplementedError, match="in process only"):
        lm.loglikelihood(requests(("a", "b")))
    with pytest.raises(NotImplementedError, match="no rolling likelihood"):
        lm.loglikelihood_rolling(requests(("a",)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gen_lenght": 1}, "did you mean 'gen_length'"),
        ({"task": "humaneval"}, "--apply_chat_template"),
        ({"api_key": "k"}, "needs base_url"),
        ({"base_url": "http://h:1", "model_path": "M"}, "in process"),
    ],
)
def test_a_bad_line_is_refused_before_anything_is_loaded(lm_class, given, words):
    with pytest.raises(errors.ConfigError, match=words):
        lm_class(**given)
    with pytest.raises(errors.RequestError, match="temperature"):
        lm_class(temperature=-1)


@pytest.mark.long
def test_lm_eval_runs_generation_and_multiple_choice_in_process(lm_class, tmp_path, monkeypatch):
    """Through lm-eval itself: its tasks, its metrics, its table."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    evaluator = importlib.import_module("lm_eval.evaluator")
    tasks = importlib.import_module("lm_eval.tasks")
    row = {
        "question": "Tom has 7 apples. He buys 5 more apples. How many apples does Tom have now?",
        "choices": [f"7 + 5 = <<7+5={n}>>{n}\n#### {n}" for n in (12, 13, 10)],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    generate = common | {
        "task": "own_generate",
        "output_type": "generate_until",
        "doc_to_target": "12",
        "generation_kwargs": {"until": [], "max_gen_toks": 64},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (\\d+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = common | {
        "task": "own_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    options = {"model_path": "jdllm-nano", "context_length": 256, "max_running_requests": 1}
    results = evaluator.simple_evaluate(
        model=lm_class(**options, mc_num=16),
        tasks=[generate, choice],
        task_manager=tasks.TaskManager(),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert results["results"]["own_generate"]["exact_match,number"] == 1.0
    assert results["results"]["own_choice"]["acc,none"] == 1.0
