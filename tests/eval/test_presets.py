"""Presets are settings that the engine takes; what somebody gives comes before them."""

import pathlib

import pytest

from jdllm.eval import __main__, model_args, presets
from jdllm.options import sampling_params
from jdllm.tasks import registry

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def sampling(*words: str, task: str = "gsm8k", changed=None, line: str = "") -> dict:
    options = __main__.make_parser().parse(["--task", task, "--output-dir", "x", *words])
    return __main__.sampling(options, changed or {}, model_args.parse(model_args.split(line)))


@pytest.mark.parametrize("task", registry.TASKS)
@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_valid_and_differs_from_no_preset(name, task):
    found = sampling("--preset", name, task=task)  # also checks the options
    params = sampling_params.SamplingParams.from_mapping(found)
    assert params.dllm.algorithm == presets.PRESETS[name].dllm["algorithm"]
    assert found != sampling(task=task)
    unknown = presets.PRESETS[name].by_task.keys() - registry.TASKS.keys()
    assert not unknown


def test_a_preset_knows_the_task():
    gsm8k, mbpp = (sampling("--preset", "d3llm-llada", task=task) for task in ("gsm8k", "mbpp"))
    assert (gsm8k["dllm"]["threshold"], mbpp["dllm"]["threshold"]) == (0.5, 0.4)
    assert gsm8k["dllm"]["cache_delay_iter"] == 2 and gsm8k["max_new_tokens"] == 256


def test_what_is_given_comes_before_a_preset():
    words = ("--preset", "d3llm-llada", "--dllm", "threshold=0.3", "--max-new-tokens", "64")
    found = sampling(*words, changed={"refresh_interval": 9}, line="cache_delay_iter=5")
    assert found["max_new_tokens"] == 64
    kept = {"threshold": 0.3, "refresh_interval": 9, "cache_delay_iter": 5, "block_length": 32}
    assert found["dllm"].items() >= kept.items()


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        (["--dllm", "algorithm=FastDLLM"], "FastDLLM"),
        (["--preset", "d3llm-llada"], "FullAttnMultiBlock"),
        (["--sweep", "algorithm=FastDLLM,LLaDA"], "FastDLLM,LLaDA"),
        (["--preset", "d3llm-llada", "--dllm-algorithm", "LLaDA,FullAttnMultiBlock"],
         "LLaDA,FullAttnMultiBlock"),
        (["--dllm", "threshold=0.3"], None),
    ],
)  # fmt: skip
def test_an_engine_is_started_with_the_algorithms_that_are_asked_for(
    words, compiled, tmp_path, monkeypatch
):
    class StartedError(Exception):
        pass

    def start(config):
        raise StartedError(config.dllm_algorithm)

    monkeypatch.setattr(__main__, "Engine", start)
    argv = ["--task", "arithmetic", "--limit", "1", "--output-dir", str(tmp_path), *words]
    with pytest.raises(StartedError) as started:
        __main__.run(__main__.make_parser().parse(argv))
    assert started.value.args == (compiled,)


def test_an_unknown_preset_and_a_preset_for_pictures_are_refused(tmp_path, capsys):
    argv = ["--output-dir", str(tmp_path), "--preset"]
    with pytest.raises(SystemExit):
        __main__.main(["--task", "gsm8k", *argv, "llada21"])
    assert "--preset" in capsys.readouterr().err
    assert __main__.main(["--task", "scenes", *argv, "llada20"]) == 2
    assert "--preset is for tasks of texts" in capsys.readouterr().err


def test_the_documentation_has_the_table():
    assert presets.markdown_table() in DOCS.read_text(), presets.markdown_table()
