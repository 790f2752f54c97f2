"""Runs against a real HTTP server in a thread and against a hand-made engine."""

from __future__ import annotations

import contextlib
import json
import resource
import threading

import pytest
from support import toy_engine, toy_server

from jdllm import errors
from jdllm.eval import __main__, backends, evaluation
from jdllm.plots import style


@pytest.fixture
def server():
    with toy_server.serving() as handler:
        yield handler


@pytest.fixture
def data(tmp_path):
    """Four questions; the toy server is right on all but "two words"."""
    rows = [
        ("one two", "#### 2"),
        ("one", "x #### 1"),
        ("two words", "#### 9"),
        ("a b c", "#### 3"),
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def run(server, data, out, *extra):
    argv = ["--task", "gsm8k", "--data", str(data), "--base-url", server.url]
    return __main__.main([*argv, "--output-dir", str(out), "--parallel", "2", *extra])


def samples(out):
    return {r["id"]: r for r in map(json.loads, (out / "samples.jsonl").read_text().splitlines())}


def test_a_run_against_a_server(server, data, tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--dllm", "threshold=0.8", "--api-key", "k", "--max-new-tokens", "77")
    assert run(server, data, out, *options) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["accuracy"] == 0.75
    assert results["tpf_mean"] == 2.0
    assert results["nfe_total"] == 12
    assert results["completion_tokens"] == 24
    assert results["backend"] == {
        "kind": "http",
        "base_url": server.url,
        "api": "chat",
        "model": "toy",
        "device": "toy device",
    }
    assert results["versions"]["jax"]
    assert results["config"]["sampling"]["dllm"] == {"threshold": 0.8}
    body = server.bodies[0]
    assert body["path"] == "/v1/chat/completions"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("toy", 77, 0.0)
    assert (body["dllm"], body["key"]) == ({"threshold": 0.8}, "Bearer k")
    assert "seed" not in body
    one = samples(out)["2"]
    assert (one["prompt"], one["gold"], one["pred"], one["correct"]) == (
        "two words",
        "9",
        "2",
        False,
    )
    assert (one["nfe"], one["completion_tokens"], one["finish_reason"]) == (3, 6, "stop")
    assert "Accuracy: 0.750\nInvalid: 0.000\nLatency: " in capsys.readouterr().out


def test_resume_asks_only_what_is_missing(server, data, tmp_path):
    out = tmp_path / "out"
    assert run(server, data, out, "--limit", "2") == 0
    with (out / "samples.jsonl").open("a") as lines:
        lines.write('{"id": "2", "pro')
    server.bodies.clear()
    assert run(server, data, out) == 0
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(asked) == ["a b c", "two words"]
    results = json.loads((out / "results.json").read_text())
    assert (results["num_examples"], results["accuracy"], results["num_sessions"]) == (4, 0.75, 2)
    server.bodies.clear()
    assert run(server, data, out) == 0
    assert server.bodies == []


def test_other_settings_in_the_same_folder_exit_2(server, data, tmp_path, capsys):
    assert run(server, data, tmp_path / "out") == 0
    assert run(server, data, tmp_path / "out", "--temperature", "0.5") == 2
    assert "temperature" in capsys.readouterr().err
    data.write_text(data.read_text().replace("one two", "one  two"))
    assert run(server, data, tmp_path / "out") == 2
    assert "data_sha256" in capsys.readouterr().err


def test_a_smaller_limit_in_the_same_folder_exits_2(server, data, tmp_path, capsys):
    assert run(server, data, tmp_path / "out") == 0
    before = (tmp_path / "out/results.json").read_text()
    assert run(server, data, tmp_path / "out", "--limit", "3") == 2
    assert "answers to 1 questions that this run does not ask" in capsys.readouterr().err
    assert (tmp_path / "out/results.json").read_text() == before


def test_a_full_disk_ends_in_one_line_and_the_same_command_goes_on(server, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(server, data, out, "--limit", "1") == 0
    size = (out / "samples.jsonl").stat().st_size
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + 20, hard))
    try:
        assert run(server, data, out, "--parallel", "1") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"jdllm eval: error: cannot write {out}/")
    assert not any("Traceback" in line for line in lines)
    assert (out / "samples.jsonl").read_bytes().endswith(b"\n")
    assert run(server, data, out) == 0
    assert sorted(samples(out)) == ["0", "1", "2", "3"]


def test_a_broken_run_keeps_its_answers_and_goes_on(server, data, tmp_path, capsys):
    out = tmp_path / "out"
    server.refuse[:] = [(400, {"error": "no"})]
    assert run(server, data, out, "--parallel", "1") == 1
    assert "answers 400" in capsys.readouterr().err
    assert not (out / "results.json").exists()
    assert run(server, data, out, "--parallel", "1") == 0
    assert sorted(samples(out)) == ["0", "1", "2", "3"]


def test_a_full_queue_is_tried_again(server, data, tmp_path):
    server.refuse[:] = [(503, {}), (503, {})]
    assert run(server, data, tmp_path / "out") == 0
    assert len(server.bodies) == 4


def test_shots_are_shown_and_not_asked(server, data, tmp_path):
    assert run(server, data, tmp_path / "out", "--num-shots", "2", "--api", "completion") == 0
    prompts = sorted(body["prompt"] for body in server.bodies)
    shots = "Question: one two\nAnswer: #### 2\n\nQuestion: one\nAnswer: x #### 1\n\n"
    assert prompts == [
        f"{shots}Question: a b c\nAnswer:",
        f"{shots}Question: two words\nAnswer:",
    ]
    assert server.bodies[0]["stop"] == ["Question:"]
    assert server.bodies[0]["path"] == "/v1/completions"


def test_without_matplotlib_a_sweep_says_why_there_is_no_plot(
    server, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(style, "matplotlib", None)
    assert run(server, data, tmp_path / "out", "--sweep", "threshold=0.5,0.9") == 0
    assert "no plot: plots need matplotlib" in capsys.readouterr().out
    assert (tmp_path / "out" / "summary.md").is_file()
    assert not (tmp_path / "out" / "sweep.png").exists()


def test_a_sweep_has_one_folder_per_point(server, data, tmp_path):
    out = tmp_path / "out"
    assert run(server, data, out, "--sweep", "threshold=0.5,0.9", "--dllm", "algorithm=X") == 2
    argv = ("--sweep", "threshold=0.5,0.9", "--dllm", "algorithm=LowConfidence")
    assert run(server, data, out, *argv) == 0
    thresholds = {body["dllm"]["threshold"] for body in server.bodies}
    assert thresholds == {0.5, 0.9}
    assert (out / "threshold=0.9" / "results.json").exists()
    assert len((out / "sweep.csv").read_text().splitlines()) == 3
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    drawn = (out / "sweep.svg").read_text()
    for text in ("tokens per forward (TPF)", "output tokens/s", "by threshold", "0.5", "0.9"):
        assert text in drawn


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--dllm", "treshold=0.5"), "did you mean 'threshold'"),
        (("--dllm", "threshold"), "KEY=VALUE"),
        (("--dllm", "algorithm=LowConfidence", "threshold=2"), "outside"),
        (("--sweep", "threshold=0.9,0.5,0.90"), "sweep of threshold has the value 0.9 twice"),
        (("--sweep", "algorithm=FastDLLM,FastDLLM"), "the value 'FastDLLM' twice"),
        (("--temperature", "-1"), "temperature"),
        (("--dtype", "float32"), "--dtype"),
        (("--num-shots", "4"), "num_shots=4"),
        (("--data", "absent.jsonl"), "absent.jsonl"),
    ],
)
def test_bad_command_lines_exit_2(server, data, tmp_path, capsys, extra, words):
    assert run(server, data, tmp_path / "out", *extra) == 2
    assert words in capsys.readouterr().err
    assert server.bodies == []


def test_bad_data_and_missing_data_exit_2(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert __main__.main(["--task", "gsm8k", "--output-dir", out]) == 2
    assert "--data FILE" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    for content in ('{"question": "q"}\n', "not json\n", '{"question": "q", "answer": "7"}\n'):
        broken.write_text(content)
        assert __main__.main(["--task", "gsm8k", "--data", str(broken), "--output-dir", out]) == 2
        assert "broken.jsonl" in capsys.readouterr().err


def test_data_that_are_no_text_are_not_printed(tmp_path, capsys):
    data = tmp_path / "test.parquet"
    data.write_bytes(b"PAR1" + b"\xff" * 100_000)
    argv = ["--task", "gsm8k", "--data", str(data), "--output-dir", str(tmp_path / "out")]
    assert __main__.main(argv) == 2
    err = capsys.readouterr().err
    assert "test.parquet" in err and "no UTF-8 text" in err and len(err) < 500


@pytest.mark.parametrize("task", ["arithmetic", "scenes"])
def test_an_output_folder_is_made_before_a_model_is_looked_for(task, tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["--task", task, "--limit", "1", "--model-path", str(tmp_path / "nowhere")]
    for folder, named in (("file/run", "cannot use"), ("run", "nowhere")):
        assert __main__.main([*argv, "--output-dir", str(tmp_path / folder)]) == 2
        assert named in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []


def test_no_server_says_so(data, tmp_path, capsys):
    argv = ["--task", "gsm8k", "--data", str(data), "--output-dir", str(tmp_path / "out")]
    assert __main__.main([*argv, "--base-url", "http://127.0.0.1:9"]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err
    assert __main__.main([*argv, "--base-url", "127.0.0.1:30000"]) == 2


def in_process(engine, data, out):
    return evaluation.evaluate(
        evaluation.load_questions("gsm8k", data=str(data)),
        backends.InProcess(engine),
        {"max_new_tokens": None, "temperature": 0.0, "seed": 5, "dllm": {"threshold": 0.7}},
        output_dir=out,
        settings={},
    )


def test_a_run_in_process(data, tmp_path):
    engine = toy_engine.ToyEngine()
    results = in_process(engine, data, tmp_path / "out")
    assert results["accuracy"] == 0.75
    assert results["tpf_mean"] == 3.0  # six tokens in two forwards
    assert results["latency_p50_s"] == 0.5
    assert results["config"]["parallel"] == 4
    params = engine.params[0]
    assert (params.seed, params.dllm.threshold) == (5, 0.7)
    assert {one.max_new_tokens for one in engine.params} == {301}


def test_answers_of_other_weights_are_not_gone_on_with(data, tmp_path):
    engine, weights = toy_engine.ToyEngine(), tmp_path / "model" / "weights"
    engine.model_dir = weights.parent
    weights.parent.mkdir()
    weights.write_text("those of yesterday")
    first = in_process(engine, data, tmp_path / "out")
    assert in_process(engine, data, tmp_path / "out")["accuracy"] == first["accuracy"]
    weights.write_text("those of today")
    with pytest.raises(errors.ConfigError, match="other settings: model_files: .* -> "):
        in_process(engine, data, tmp_path / "out")


def test_a_refused_request_names_its_example(data, tmp_path):
    engine = toy_engine.ToyEngine()
    data.write_text(data.read_text() + '{"question": "a b c d e f", "answer": "#### 6"}\n')
    with pytest.raises(backends.BackendError, match="example 4: .*too long for the toy"):
        in_process(engine, data, tmp_path / "out")
    assert engine.aborted == 1


def test_ctrl_c_keeps_what_is_written(data, tmp_path):
    engine = toy_engine.ToyEngine()
    backend = backends.InProcess(engine)
    questions = evaluation.load_questions("gsm8k", data=str(data))
    gate = threading.Event()

    class Interrupted(Exception):
        """Stands for the signal: it breaks off at the second record."""

    def score(output, gold):
        if gate.is_set():
            raise Interrupted
        gate.set()
        return questions.task.score(output, gold)

    task = evaluation.dataclasses.replace(questions.task, score=score)
    broken = evaluation.dataclasses.replace(questions, task=task)
    with contextlib.suppress(Interrupted):
        evaluation.evaluate(broken, backend, {}, output_dir=tmp_path / "out", settings={})
    assert len(samples(tmp_path / "out")) == 1
    results = evaluation.evaluate(questions, backend, {}, output_dir=tmp_path / "out", settings={})
    assert (results["num_examples"], results["num_sessions"]) == (4, 2)


def test_arithmetic_needs_no_file():
    questions = evaluation.load_questions("arithmetic", limit=3, num_shots=1)
    assert len(questions.examples) == 3
    assert len({example.id for example in (*questions.examples, *questions.shots)}) == 4
    assert questions.prompt(questions.examples[0]).endswith("\nAnswer:")
