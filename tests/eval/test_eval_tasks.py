"""Code tasks, `--model_args` and the fields for lm-eval, through the command line."""

import json
import sys

import pytest
from support import toy_server

from jdllm.eval import __main__
from jdllm.tasks import code

MBPP = [
    {"task_id": i, "text": f"task {i}", "code": "", "test_list": ["assert f(1) == 2"]}
    for i in range(4)
]
ANSWERS = (
    "```python\ndef f(x):\n    return x + 1\n```",
    "def f(x):\n    return x",
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
)
HARNESS_FIELDS = {
    "results", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples",
}  # fmt: skip


@pytest.fixture
def server():
    with toy_server.serving() as handler:
        yield handler


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [("one two", "#### 2"), ("one", "#### 1"), ("a b", "#### 9")]
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def run(server, task, data, out, *extra):
    argv = ["--task", task, "--data", str(data), "--base-url", server.url, "--output-dir", str(out)]
    return __main__.main([*argv, *extra])


def results_of(out):
    return json.loads((out / "results.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
def test_programs_are_run_and_only_a_full_run_counts(server, tmp_path, capsys):
    data, out = tmp_path / "mbpp.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in MBPP))
    examples = code.load_mbpp(str(data))
    server.texts |= {
        code.build_mbpp_prompt(example): text
        for example, text in zip(examples, ANSWERS, strict=True)
    }
    assert run(server, "mbpp", data, out) == 0, capsys.readouterr().err
    results = results_of(out)
    assert results["accuracy"] == 0.25
    assert results["results"]["mbpp"]["pass@1,none"] == 0.25
    assert results["config"]["code_isolation"] == "isolated"
    lines = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
    assert {line["id"]: line["pred"] for line in lines} == {
        "0": "passed",
        "1": "AssertionError: ",
        "2": "SystemExit: 0",
        "3": "it ended before the tests did",
    }
    assert run(server, "mbpp", data, out, "--allow-unisolated-code") == 2
    assert "code_isolation" in capsys.readouterr().err


def test_results_have_the_fields_of_lm_eval(server, gsm8k, tmp_path):
    assert run(server, "gsm8k", gsm8k, tmp_path / "out", "--num-shots", "1") == 0
    results = results_of(tmp_path / "out")
    assert results.keys() >= HARNESS_FIELDS
    row = results["results"]["gsm8k"]
    assert row["alias"] == "gsm8k"
    assert row["exact_match,none"] == results["accuracy"] == 0.0  # the shots count as words
    assert row["exact_match_stderr,none"] == results["accuracy_stderr"]
    assert row["tpf,none"] == results["tpf_mean"] == 2.0
    assert results["versions"]["gsm8k"] == 1
    assert "jax" in results["versions"]
    assert results["n-shot"] == {"gsm8k": 1}
    assert results["higher_is_better"]["gsm8k"]["exact_match"] is True
    assert results["n-samples"]["gsm8k"]["effective"] == 2


def test_lm_eval_s_make_table_prints_the_results(server, gsm8k, tmp_path):
    utils = pytest.importorskip("lm_eval.utils")
    assert run(server, "gsm8k", gsm8k, tmp_path / "out", "--limit", "1") == 0  # no standard error
    assert run(server, "gsm8k", gsm8k, tmp_path / "out") == 0
    for table in (utils.make_table(results_of(tmp_path / "out")),):
        rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
        assert [row[1:9] for row in rows if "exact_match" in row] == [
            ["gsm8k", "1", "none", "0", "exact_match", "↑", "0.6667", "±"]
        ]
        assert {row[5] for row in rows[2:] if len(row) > 5} >= {"tpf", "nfe", "invalid_rate"}


def test_a_line_of_model_args_does_what_the_flags_do(server, gsm8k, tmp_path):
    line = (
        "gen_length=64,steps=64,block_length=32,threshold=0.5,temperature=0.1,show_speed=True,"
        "generation_method=generate_multi_block,num_concurrent=3"
    )
    assert run(server, "gsm8k", gsm8k, tmp_path / "line", "--model_args", line) == 0
    config = results_of(tmp_path / "line")["config"]
    assert config["parallel"] == 3
    assert config["sampling"] == {
        "max_new_tokens": 64,
        "temperature": 0.1,
        "seed": None,
        "dllm": {
            "algorithm": "FullAttnMultiBlock",
            "threshold": 0.5,
            "block_length": 32,
            "cache_mode": "exact",
        },
    }
    assert server.bodies[0]["max_tokens"] == 64
    flags = ("--max-new-tokens", "64", "--temperature", "0.1", "--parallel", "3", "--dllm")
    dllm = [f"{name}={value}" for name, value in config["sampling"]["dllm"].items()]
    # The same run: it goes on in the same folder.
    assert run(server, "gsm8k", gsm8k, tmp_path / "line", *flags, *dllm) == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--model_args", "gen_lenght=64"), "did you mean 'gen_length'"),
        (("--model_args", "gen_length=64", "--max-new-tokens", "64"), "both give max_new_tokens"),
        (("--model_args", "threshold=0.5", "--dllm", "threshold=0.5"), "both give threshold"),
        (("--model_args", "mc_num=128"), "jdllm.eval.lm_eval"),
        (("--model_args", "dtype=float32"), "--dtype"),
        (("--model_args", "device=tpu"), "JAX_PLATFORMS"),
        (("--model_args", "threshold=7,algorithm=LowConfidence"), "outside"),
    ],
)
def test_bad_lines_exit_2(server, gsm8k, tmp_path, capsys, extra, words):
    assert run(server, "gsm8k", gsm8k, tmp_path / "out", *extra) == 2
    assert words in capsys.readouterr().err
    assert server.bodies == []


def test_examples_with_one_id_are_refused(server, tmp_path, capsys):
    data = tmp_path / "mbpp.jsonl"
    data.write_text(f"{json.dumps(MBPP[0])}\n" * 2)
    assert run(server, "mbpp", data, tmp_path / "out") == 2
    assert "more than one example '0'" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["gsm8k", "math500", "humaneval", "mbpp"])
def test_a_task_without_its_file_says_which(task, tmp_path, capsys):
    assert __main__.main(["--task", task, "--output-dir", str(tmp_path)]) == 2
    assert "needs --data FILE: " in capsys.readouterr().err
